"""Run a PyTorch test file unmodified: `python -m torch_testing_ext.upstream run FILE [unittest arguments]`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_testing_ext._cases import invocation

from . import drop_in
from .mapping import UserError


def run(path: Path, arguments: Sequence[str], explain: bool) -> None:
    """Run the file as `python FILE` would, with our test kit in place of PyTorch's. Exits as the file does."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; name a test file, as in: run test/distributed/test_store.py -v")
    drop_in.install()
    invocation.python_arguments = ["-m", "torch_testing_ext.upstream", "run"]
    sys.argv[:] = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        if explain:
            print(drop_in.explain(), file=sys.stderr)
    raise UserError(f"{path} ran no tests: it does not call run_tests() at its end. Run it with pytest instead")
