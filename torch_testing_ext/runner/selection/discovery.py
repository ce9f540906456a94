"""Finds the test files: below the test directories, and below the paths that the user names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..options.options import Options, UsageError


def test_files(options: Options, root: Path, cwd: Path) -> tuple[str, ...]:
    """Their paths relative to the root, sorted. Raises UsageError."""
    named = (split_name(name, root, cwd)[0] for name in (*options.names, *options.include))
    paths = [path for name in named if name and _exists(path := cwd / name)]
    pointed_to = [path for path in paths if path.is_dir() or (path.suffix == ".py" and path.is_file())]
    found = {*_below(options.tests), *_below(pointed_to)}
    return tuple(sorted(_relative_to(root, file) for file in found))


test_files.__test__ = False  # type: ignore[attr-defined]  # its name looks like a test to pytest


def split_name(name: str, root: Path, cwd: Path) -> tuple[str, str]:
    """The path of a name, and the class and test after `::`; the path may have a `::` in it if it exists."""
    parts = name.split("::")
    splits = [("::".join(parts[:length]), "::".join(parts[length:])) for length in range(len(parts), 0, -1)]
    existing = (split for split in splits if split[0] and any(_exists(base / split[0]) for base in (cwd, root)))
    return next(existing, splits[-1])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no path can have: too long, or with a zero
        return False


def _below(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        if place.is_file():
            yield place.resolve()
        elif place.is_dir():
            yield from _walk(place.resolve())
        else:
            raise UsageError(f"test directory {place} does not exist; set the directories to search with --tests")


def _walk(folder: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        yield from (Path(directory, name) for name in files if name.startswith("test_") and name.endswith(".py"))


def _refuse(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read: {error.strerror}")


def _relative_to(root: Path, file: Path) -> str:
    if not file.is_relative_to(root.resolve()):
        raise UsageError(f"{file} is outside {root}: names of tests are relative to that directory")
    return file.relative_to(root.resolve()).as_posix()
