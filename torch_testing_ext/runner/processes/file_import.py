"""The import of a test file, and what its failure means."""

from __future__ import annotations

import os
import sys
import unittest
import unittest.util
from types import ModuleType

from torch_testing_ext._process import importing
from torch_testing_ext._process.importing import ModulePlace


def import_test_file(path: str) -> ModuleType:
    """Import a file as a member of its package, or as a program if it is in none or another one has the name."""
    place = ModulePlace.of(path)
    importing.forget_stdlib_test_package(place)
    if not place.packages or place.obstacle():
        name = place.name.rpartition(".")[2]
        if name in sys.modules:
            name += "_as_program"
        return importing.import_file(name, path)
    root = str(place.root)
    if root not in sys.path:
        # Behind the file's folder, and last if the root has another torch.
        has_torch = (place.root / "torch").is_dir()
        sys.path.insert(len(sys.path) if has_torch else 1, root)
    importing.import_packages(place)
    # The package may have imported the file already.
    file = getattr(sys.modules.get(place.name), "__file__", None)
    if file is not None and os.path.realpath(file) == os.path.realpath(path):
        return sys.modules[place.name]
    return importing.import_file(place.name, path)


def how_to_import(error: BaseException, path: str) -> str:
    """Advice if an import failed because of the package that the file is in, or is in none; or ""."""
    if not isinstance(error, ImportError):
        return ""
    place = ModulePlace.of(path)
    obstacle = place.obstacle()
    if error.name == place.name and obstacle:
        return (
            f"pytest imports the file as {place.name}, but {obstacle}. Rename {place.packages[0]}, or its __init__.py."
        )
    if "relative import" not in str(error):
        return ""
    if obstacle:
        why = f"{obstacle}, so the file is not imported as {place.name}"
    elif place.packages:
        return f"The file is imported as {place.name}, from {place.root}: the import leads out of {place.packages[0]}."
    else:
        why = f"{os.path.dirname(path)} has no __init__.py"
    return (
        f"The file is imported as a program, as by `python {os.path.basename(path)}`, because {why}.\n"
        "A program has no relative imports. Its folder is the first in sys.path: import what lies there by its name\n"
        "alone (`from helper import f`, not `from .helper import f`). Or make the folder a package, by an __init__.py\n"
        "in it: then the file is imported as a member of that package."
    )


def reason_to_skip(error: BaseException) -> str | None:
    """The reason if an exception skips the file: unittest's, or pytest's (`pytest.importorskip`)."""
    if isinstance(error, unittest.SkipTest):
        return str(error)
    pytest = sys.modules.get("pytest")
    if pytest is not None and isinstance(error, pytest.skip.Exception) and error.allow_module_level:
        return str(error)
    return None
