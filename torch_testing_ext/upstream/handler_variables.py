"""The variables that PyTorch's run_test.py sets for a few of its files, which cannot be imported without them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# PyTorch runs them once for each backend; --drop-in over gloo, unless the user has set these.
FILES = ("distributed/test_distributed_spawn.py", "distributed/algorithms/quantization/test_quantization.py")
_FOLDER = "TEMP_DIR"
_VALUES = {"BACKEND": "gloo", "WORLD_SIZE": "3"}


@contextmanager
def for_import(file: str) -> Iterator[None]:
    """Set them while such a file is imported. All but the folder, which each test gets, stay."""
    if not file.endswith(FILES) or _FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="torch_testing_ext.") as folder:
        use_folder(file, Path(folder))
        try:
            yield
        finally:
            del os.environ[_FOLDER]


def use_folder(file: str, folder: Path) -> None:
    """Set them for a test of such a file. The folder is the test's own."""
    if file.endswith(FILES) and _FOLDER not in os.environ:
        for name, value in _VALUES.items():
            os.environ.setdefault(name, value)
        os.environ[_FOLDER] = str(folder)
        # PyTorch's handler makes these folders.
        for name in ("barrier", "test_dir"):
            (folder / name).mkdir(exist_ok=True)
