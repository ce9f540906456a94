"""The test files below the test directories and below the paths that the user names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from torch_testing_ext.runner.options import Options, UsageError
from torch_testing_ext.runner.options.default_folders import default_folders

NOWHERE = (
    "no tests found in {root}. Name a folder or file, or set tests in [tool.torch_testing_ext] or testpaths of pytest"
)

# The default of pytest's python_files.
_PATTERNS = ("test_*.py", "*_test.py")
# The folders of pytest's norecursedirs, which has virtual environments, too.
_OTHERS = ("build", "dist", "node_modules")


def test_files(options: Options, root: Path, cwd: Path) -> tuple[str, ...]:
    """The paths relative to the root, sorted, of files that have tests by their names. Raises UsageError.

    Where pytest loads the files, it may have others: only its configuration, hooks and plugins know.
    """
    named = named_places(options, root, cwd)
    pointed_to = [path for path in named if path.is_dir() or path.suffix == ".py"]
    configured = list(options.tests)
    if pointed_to:
        configured = [place for place in configured if place.exists()]
    if not configured and len(named) < max(1, len(options.names) + len(options.include)):
        configured = list(default_folders(root))
    names = set()
    for file in files_below((*configured, *pointed_to)):
        names.add(relative_to(root, file))
    return tuple(sorted(names))


test_files.__test__ = False  # type: ignore[attr-defined]  # its name looks like a test to pytest


def named_places(options: Options, root: Path, cwd: Path) -> list[Path]:
    """The files and folders that exist under the names of a user."""
    places = []
    for text in (*options.names, *options.include):
        name, _ = split_name(text, root, cwd)
        path = _existing(name, cwd, root) if name else None
        if path is not None:
            places.append(path)
    return places


def all_files(root: Path) -> Iterator[str]:
    """The relative paths of all files that names of a user may mean."""
    for directory, folders, files in os.walk(root):
        folders[:] = [name for name in folders if _may_have_tests(name)]
        for name in files:
            yield os.path.relpath(os.path.join(directory, name), root)


def split_name(name: str, root: Path, cwd: Path) -> tuple[str, str]:
    """The path of a name, and the class and test after `::`; the path may have a `::` in it if it exists."""
    parts = name.split("::")
    for length in range(len(parts), 0, -1):
        path = "::".join(parts[:length])
        if path and (_exists(cwd / path) or _exists(root / path)):
            return path, "::".join(parts[length:])
    return parts[0], "::".join(parts[1:])


def _existing(name: str, *places: Path) -> Path | None:
    for place in places:
        if _exists(place / name):
            return place / name
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        # A name that no path can have: too long, or with a zero.
        return False


def files_below(places: Iterable[Path]) -> Iterator[Path]:
    """The test files below folders, but for those in folders that have others' code, and the files among the places."""
    for place in places:
        if place.is_file():
            yield place
        elif place.is_dir():
            yield from _walk(place)
        else:
            raise UsageError(
                f"test directory {place} does not exist; the setting `tests` names the directories to search"
            )


def _walk(folder: Path, trees: tuple[Path, ...] = ()) -> Iterator[Path]:
    """`trees`: what is being walked; a link out of them is followed, since nothing else leads there."""
    trees = (*trees, folder.resolve())
    for directory, folders, files in os.walk(folder, onerror=_refuse):
        is_virtual_environment = "pyvenv.cfg" in files and directory != str(folder)
        if is_virtual_environment:
            folders.clear()
            continue
        folders[:] = [name for name in folders if _may_have_tests(name)]
        for name in files:
            if any(fnmatchcase(name, pattern) for pattern in _PATTERNS):
                yield Path(directory, name)
        for name in folders:
            link = Path(directory, name)
            if link.is_symlink() and not _overlaps(link.resolve(), trees):
                yield from _walk(link, trees)


def _may_have_tests(folder: str) -> bool:
    return not folder.startswith((".", "__")) and folder not in _OTHERS


def _overlaps(target: Path, trees: tuple[Path, ...]) -> bool:
    """Whether one of these trees has the folder, or is in it."""
    for tree in trees:
        if target.is_relative_to(tree):
            return True
        if tree.is_relative_to(target):
            return True
    return False


def _refuse(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read: {error.strerror}")


def relative_to(root: Path, path: Path) -> str:
    """The path by its own name if that is below the root, else by that of what a link leads to."""
    root = root.resolve()
    for place in (Path(os.path.abspath(path)), path.resolve()):
        if place.is_relative_to(root):
            return place.relative_to(root).as_posix()
    raise UsageError(f"{path} is outside {root}: names of tests are relative to that directory")
