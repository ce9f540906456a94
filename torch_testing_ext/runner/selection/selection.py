"""Selects files and tests by name. Pure: names in, names out.

A name selects its closest matches: files and folders with exactly this path; else paths that contain it; else paths
that contain it if its last part may be the beginning of a file's or folder's name. `::` adds a class and a test.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..model import Test, TestId
from ..options.options import Options, UsageError, nearest
from . import expressions
from .discovery import relative_to, split_name

_CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*(?:async )?def (\w+)", re.MULTILINE)
_MARK = re.compile(r"\bmark\.(\w+)")


class _Closeness(enum.IntEnum):
    """The closeness of a name to a file; smaller is closer."""

    PATH = 0  # the file itself, or a folder that contains it
    PART = 1  # consecutive whole parts of its path
    BEGINNING = 2  # likewise, but only the beginning of the last part
    NONE = 3


@dataclass(frozen=True)
class _Name:
    """A name as the user wrote it."""

    text: str
    path: str
    inner: str  # a class, a test, or both with :: between them; the name of a test may have a :: in it, too

    @classmethod
    def read(cls, text: str, root: Path, cwd: Path) -> _Name:
        path, inner = split_name(text, root, cwd)
        return cls(text, _from_root(path, root, cwd), inner)


def _from_root(path: str, root: Path, cwd: Path) -> str:
    """A path that exists in the working directory, relative to the root; any other name unchanged."""
    try:
        return relative_to(root, cwd / path) if path and (cwd / path).exists() else path
    except (OSError, ValueError, UsageError):  # too long for a path, or with a zero; outside of the root
        return path


@dataclass(frozen=True)
class Selection:
    """The selection of the user, applied in two steps: to files before they are imported, to tests afterwards."""

    included: tuple[_Name, ...]
    excluded: tuple[_Name, ...]
    matches: tuple[expressions.Matches, ...]
    marks: tuple[expressions.MatchesMarks, ...] = ()

    @classmethod
    def of(cls, options: Options, root: Path, cwd: Path) -> Selection:
        """The selection that the options describe. Raises UsageError."""

        def read(names: Iterable[str]) -> tuple[_Name, ...]:
            return tuple(_Name.read(name, root, cwd) for name in names)

        matches = tuple(expressions.parse_expression(text) for text in options.keyword)
        marks = tuple(expressions.parse_marks(text) for text in options.marks)
        return cls(read((*options.names, *options.include)), read(options.exclude), matches, marks)

    def files(self, known: Sequence[str]) -> tuple[str, ...]:
        """The files to import. Raises UsageError."""
        included = {file for name in self.included for file in _files(name, known)} if self.included else set(known)
        excluded = {file for name in self.excluded for file in _files(name, known) if not name.inner}
        return tuple(file for file in known if file in included - excluded)

    def tests(self, known: Sequence[Test], files: Sequence[str]) -> tuple[Test, ...]:
        """The tests to run, of those in imported files; broken and unselected files have none. Raises UsageError."""
        included = [_predicate(name, known, files, or_unknown=True) for name in self.included]
        excluded = [_predicate(name, known, files, or_unknown=False) for name in self.excluded]

        def wanted(test: Test) -> bool:
            return (
                (not included or any(matches(test.id) for matches in included))
                and not any(matches(test.id) for matches in excluded)
                and (not self.matches or any(matches(test.id) for matches in self.matches))
                and (not self.marks or any(matches(test) for matches in self.marks))
            )

        return tuple(test for test in known if wanted(test))

    def may_select_from(self, file: str, source: str) -> bool:
        """May a file that cannot be imported have a test that -k and -m select, by the names in its source?"""
        classes, functions, marks = (tuple(found.findall(source)) for found in (_CLASS, _FUNCTION, _MARK))
        tests = [TestId(file, cls, name) for cls in ("", *classes) for name in ("", *functions)]
        return (not self.matches or any(matches(test) for matches in self.matches for test in tests)) and (
            not self.marks or any(matches(Test(tests[0], marks=some)) for matches in self.marks for some in ((), marks))
        )


# -- files


def _files(name: _Name, known: Sequence[str]) -> tuple[str, ...]:
    closeness = {file: _closeness(name.path, file) for file in known}
    closest = min(closeness.values(), default=_Closeness.NONE)
    if closest is _Closeness.NONE:
        alike = nearest(name.path, known if "/" in name.path else {_parts(file)[-1] for file in known})
        raise UsageError(f"{name.text}: no test file has this name, or one that begins with it.{alike}")
    return tuple(file for file in known if closeness[file] is closest)


def _closeness(path: str, file: str) -> _Closeness:
    if PurePosixPath(file).is_relative_to(path):
        return _Closeness.PATH
    wanted, parts = _parts(path), _parts(file)
    places = range(len(parts) - len(wanted) + 1) if wanted else ()
    if any(parts[place : place + len(wanted)] == wanted for place in places):
        return _Closeness.PART
    for place in places:
        *folders, name = parts[place : place + len(wanted)]
        if folders == wanted[:-1] and name.startswith(wanted[-1]):
            return _Closeness.BEGINNING
    return _Closeness.NONE


def _parts(path: str) -> list[str]:
    """The parts of a path, or of a module's dotted name."""
    path = path.strip("/").removesuffix(".py")
    return [part for part in path.replace(".", "/").split("/") if part]


# -- tests


def _predicate(name: _Name, known: Sequence[Test], files: Sequence[str], or_unknown: bool) -> Callable[[TestId], bool]:
    """`or_unknown`: a file that skips all of its tests may have the test, so it is selected."""
    in_files = frozenset(_files(name, files))
    if not name.inner:
        return lambda test: test.file in in_files
    in_place = [test.id for test in known if test.id.file in in_files]
    candidates = [test for test in in_place if test.method]
    skipped = frozenset(test for test in in_place if not test.method and or_unknown)
    # Exactly this name, or a test of pytest with any parameters (`test_x` for `test_x[1]`), or the beginning of a name.
    for is_meant in (
        lambda part: part == name.inner,
        lambda part: part.startswith(f"{name.inner}["),
        lambda part: part.startswith(name.inner),
    ):
        tests = frozenset(test for test in candidates if any(map(is_meant, _parts_of(test))))
        if tests:
            return (tests | skipped).__contains__
    if in_files - {test.file for test in candidates}:
        return skipped.__contains__  # the test may be in a file whose tests are unknown: it is broken or skips them all
    names = [part for test in candidates for part in _parts_of(test)]
    raise UsageError(
        f"{name.text}: no test in these files has this name, or one that begins with it.{nearest(name.inner, names)}"
    )


def _parts_of(test: TestId) -> tuple[str, ...]:
    """The names that the user may write after the file: the class, the test, or both."""
    return (test.cls, test.method, f"{test.cls}::{test.method}") if test.cls else (test.method,)
