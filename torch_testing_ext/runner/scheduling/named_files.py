"""The test files that a name of the user means.

A name selects its closest matches: files and folders with exactly this path; else paths that contain it; else paths
that contain it if its last part may be the beginning of a file's or folder's name. `::` adds a class and a test.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torch_testing_ext._process.words import nearest
from torch_testing_ext.runner.options import UsageError
from torch_testing_ext.runner.options.commands import COMMANDS

from .finding_files import relative_to, split_name


class _Closeness(enum.IntEnum):
    """The closeness of a name to a file; smaller is closer."""

    # The file itself, or a folder that contains it.
    PATH = 0
    # Consecutive whole parts of its path.
    PART = 1
    # Likewise, but only the beginning of the last part.
    BEGINNING = 2
    NONE = 3


@dataclass(frozen=True)
class NameByUser:
    """A name as the user wrote it."""

    text: str
    path: str
    # A class, a test, or both with :: between them; the name of a test may have a :: in it, too.
    inner: str

    @classmethod
    def read(cls, text: str, root: Path, cwd: Path) -> NameByUser:
        path, inner = split_name(text, root, cwd)
        return cls(text, _from_root(path, root, cwd), inner)


def _from_root(path: str, root: Path, cwd: Path) -> str:
    """A path that exists in the working directory, relative to the root; any other name unchanged."""
    try:
        if path and (cwd / path).exists():
            return relative_to(root, cwd / path)
    except (OSError, ValueError, UsageError):
        # It is too long for a path, or has a zero; or it is outside of the root.
        pass
    return path


def files_of(name: NameByUser, known: Sequence[str]) -> tuple[str, ...]:
    """The files that a name means: all that are closest to it."""
    closeness = {file: _closeness(name.path, file) for file in known}
    closest = min(closeness.values(), default=_Closeness.NONE)
    if closest is _Closeness.NONE:
        candidates = set(known)
        if "/" not in name.path:
            candidates = {_parts(file)[-1] for file in known}
        command = difflib.get_close_matches(name.text, COMMANDS, 1, cutoff=0.7)
        alike = f" Did you mean the command {command[0]}?" if command else nearest(name.path, candidates)
        alike = alike or " --list lists the tests."
        raise UsageError(f"{name.text}: no test file has this name or starts with it.{alike}")
    return tuple(file for file in known if closeness[file] is closest)


def _closeness(path: str, file: str) -> _Closeness:
    """The closeness of a file to the path in a name."""
    if PurePosixPath(file).is_relative_to(path):
        return _Closeness.PATH
    wanted = _parts(path)
    if not wanted:
        return _Closeness.NONE
    parts = _parts(file)
    length = len(wanted)
    windows = [parts[start : start + length] for start in range(len(parts) - length + 1)]
    if wanted in windows:
        return _Closeness.PART
    for *folders, name in windows:
        if folders == wanted[:-1] and name.startswith(wanted[-1]):
            return _Closeness.BEGINNING
    return _Closeness.NONE


def _parts(path: str) -> list[str]:
    """The parts of a path, or of a module's dotted name."""
    path = path.strip("/").removesuffix(".py")
    parts = path.replace(".", "/").split("/")
    return [part for part in parts if part]
