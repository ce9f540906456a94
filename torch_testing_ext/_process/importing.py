"""The package that a test file belongs to, and the import of the file as a member of it.

A file belongs to a package if its folder has an `__init__.py`, as for Python and pytest. Its full name begins with
the topmost of such folders. Packages are imported by location: a name such as `test` is also one of the standard
library.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


class NoModule(ImportError):
    """A file that Python cannot import, whatever is in it."""


@dataclass(frozen=True)
class ModulePlace:
    """The full name of a file's module, and the folder that holds its topmost package."""

    name: str
    root: Path

    @classmethod
    def of(cls, file: str | Path) -> ModulePlace:
        """Without a package, the module has the name of the file, and the root is the file's folder."""
        file = Path(file)
        folder = file.parent
        # A dot would separate a package.
        parts = [file.stem.replace(".", "_")]
        while folder.name.isidentifier() and (folder / "__init__.py").is_file():
            parts.insert(0, folder.name)
            folder = folder.parent
        return cls(".".join(parts), folder)

    @property
    def packages(self) -> tuple[str, ...]:
        """The full names of the packages that the module is in, the topmost first."""
        *parts, _ = self.name.split(".")
        names = []
        for length in range(1, len(parts) + 1):
            names.append(".".join(parts[:length]))
        return tuple(names)

    def folder_of(self, package: str) -> Path:
        return self.root.joinpath(*package.split("."))

    def obstacle(self) -> str:
        """Return the reason why the file cannot be imported as a member of its package; "" if it can.

        Another package may have the name.
        """
        for package in self.packages:
            module = sys.modules.get(package)
            if module is not None and not _is_at(module, self.folder_of(package)):
                taken_by = getattr(module, "__file__", None) or "another module"
                return f"the name {package} is taken by {taken_by}"
        return ""


def import_packages(place: ModulePlace) -> None:
    """Import the packages that a module is in, each from its folder."""
    for package in place.packages:
        if package not in sys.modules:
            folder = place.folder_of(package)
            import_file(package, folder / "__init__.py", [str(folder)])


def import_file(name: str, file: str | Path, folders: list[str] | None = None, full_name: str = "") -> ModuleType:
    """Import a file under a name; the packages that it is in are imported already.

    `folders`: where the submodules of a package are. `full_name`: for a main module, the name that says which package
    it is in.
    """
    spec = importlib.util.spec_from_file_location(name, str(file), submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise NoModule(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if full_name:
        # `python -m` does the same.
        module.__spec__ = importlib.util.spec_from_file_location(full_name, str(file))
        module.__package__ = full_name.rpartition(".")[0]
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    package, _, child = name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], child, sys.modules.get(name, module))
    return sys.modules.get(name, module)


def _is_at(package: ModuleType, folder: Path) -> bool:
    try:
        places = getattr(package, "__path__", ())
        return any(os.path.samefile(place, folder) for place in places)
    except OSError:
        return False


def forget_stdlib_test_package(place: ModulePlace) -> None:
    """Forget the standard library's package `test` if the module is in another package of that name."""
    if place.packages[:1] != ("test",) or not place.obstacle():
        return
    stdlib = Path(os.__file__).parent
    file = getattr(sys.modules["test"], "__file__", None) or ""
    if Path(file).parent == stdlib / "test":
        for name in list(sys.modules):
            if name.partition(".")[0] == "test":
                del sys.modules[name]
