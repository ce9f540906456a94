"""Finds the test files: below the test directories, and below the paths that the user names."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..options.options import Options, UsageError

_NOWHERE = (
    "{root} has no folder test or tests, no test_*.py and no testpaths of pytest: name a folder or a file, or set the "
    "directories to search with --tests, or in pyproject.toml: [tool.torch_testing_ext] tests"
)

# As pytest's norecursedirs, which has virtual environments, too.
_OTHERS = ("build", "dist", "node_modules")


def test_files(options: Options, root: Path, cwd: Path) -> tuple[str, ...]:
    """Their paths relative to the root, sorted. Raises UsageError."""
    named = (split_name(name, root, cwd)[0] for name in (*options.names, *options.include))
    paths = [path for name in named if name and (path := _existing(name, cwd, root))]
    pointed_to = [path for path in paths if path.is_dir() or (path.suffix == ".py" and path.is_file())]
    configured = [place for place in options.tests if not pointed_to or place.exists()]
    if not configured and not paths:
        raise UsageError(_NOWHERE.format(root=root))
    found = (*files_below(configured), *files_below(pointed_to))
    return tuple(sorted({relative_to(root, file) for file in found}))


test_files.__test__ = False  # type: ignore[attr-defined]  # its name looks like a test to pytest


def split_name(name: str, root: Path, cwd: Path) -> tuple[str, str]:
    """The path of a name, and the class and test after `::`; the path may have a `::` in it if it exists."""
    parts = name.split("::")
    splits = [("::".join(parts[:length]), "::".join(parts[length:])) for length in range(len(parts), 0, -1)]
    existing = (split for split in splits if split[0] and any(_exists(base / split[0]) for base in (cwd, root)))
    return next(existing, splits[-1])


def _existing(name: str, *places: Path) -> Path | None:
    return next((place / name for place in places if _exists(place / name)), None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no path can have: too long, or with a zero
        return False


def files_below(places: Iterable[Path]) -> Iterator[Path]:
    """The test files below folders, but for those in folders that have others' code, and the files among the places."""
    for place in places:
        if place.is_file():
            yield place
        elif place.is_dir():
            yield from _walk(place)
        else:
            raise UsageError(f"test directory {place} does not exist; set the directories to search with --tests")


def _walk(folder: Path, trees: tuple[Path, ...] = ()) -> Iterator[Path]:
    """`trees`: what is being walked; a link out of them is followed, since nothing else leads there."""
    trees = (*trees, folder.resolve())
    for directory, folders, files in os.walk(folder, onerror=_refuse):
        if "pyvenv.cfg" in files and directory != str(folder):  # a virtual environment
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith((".", "__")) and name not in _OTHERS]
        yield from (Path(directory, name) for name in files if name.startswith("test_") and name.endswith(".py"))
        for link in (path for name in folders if (path := Path(directory, name)).is_symlink()):
            target = link.resolve()
            if not any(target.is_relative_to(tree) or tree.is_relative_to(target) for tree in trees):
                yield from _walk(link, trees)


def _refuse(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read: {error.strerror}")


def relative_to(root: Path, path: Path) -> str:
    """The path by its own name if that is below the root, else by that of what a link leads to."""
    root = root.resolve()
    for place in (Path(os.path.abspath(path)), path.resolve()):
        if place.is_relative_to(root):
            return place.relative_to(root).as_posix()
    raise UsageError(f"{path} is outside {root}: names of tests are relative to that directory")
