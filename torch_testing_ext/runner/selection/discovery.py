"""Finds the test files: below the test directories, and below the paths that the user names."""

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from ..options.options import Options, UsageError

_NOWHERE = (
    "{root} has no folder test or tests, no test_*.py and no testpaths of pytest: name a folder or a file, or set the "
    "directories to search with --tests, or in pyproject.toml: [tool.torch_testing_ext] tests"
)


def test_files(options: Options, root: Path, cwd: Path) -> tuple[str, ...]:
    """Their paths relative to the root, sorted. Raises UsageError."""
    named = (split_name(name, root, cwd)[0] for name in (*options.names, *options.include))
    paths = [path for name in named if name and (path := _existing(name, cwd, root))]
    pointed_to = [path for path in paths if path.is_dir() or (path.suffix == ".py" and path.is_file())]
    configured = [place for place in options.tests if not pointed_to or place.exists()]
    if not configured and not paths:
        raise UsageError(_NOWHERE.format(root=root))
    found = {*files_below(configured), *files_below(pointed_to)}
    return tuple(sorted(_relative_to(root, file) for file in found))


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


def files_below(places: Iterable[Path], left_out: Collection[str] = ()) -> Iterator[Path]:
    """The test files below folders, but for those in folders that are left out, and the files among the places."""
    for place in places:
        if place.is_file():
            yield place.resolve()
        elif place.is_dir():
            yield from _walk(place.resolve(), left_out)
        else:
            raise UsageError(f"test directory {place} does not exist; set the directories to search with --tests")


def _walk(folder: Path, left_out: Collection[str]) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "__")) and name not in left_out]
        yield from (Path(directory, name) for name in files if name.startswith("test_") and name.endswith(".py"))


def _refuse(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read: {error.strerror}")


def _relative_to(root: Path, file: Path) -> str:
    if not file.is_relative_to(root.resolve()):
        raise UsageError(f"{file} is outside {root}: names of tests are relative to that directory")
    return file.relative_to(root.resolve()).as_posix()
