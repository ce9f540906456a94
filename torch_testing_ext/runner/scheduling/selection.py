"""The choice of files and tests by name.

A name selects its closest matches: files and folders with exactly this path; else paths that contain it; else paths
that contain it if its last part may be the beginning of a file's or folder's name. `::` adds a class and a test.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from torch_testing_ext._process.words import nearest
from torch_testing_ext.runner.model import Test, TestId
from torch_testing_ext.runner.options import Options, UsageError
from torch_testing_ext.runner.options.commands import COMMANDS

from .expressions import Matches, MatchesMarks, parse_expression, parse_marks
from .finding_files import relative_to, split_name

if TYPE_CHECKING:
    from .disabled_tests import DisabledTest

_CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*(?:async )?def (\w+)", re.MULTILINE)
_MARK = re.compile(r"\bmark\.(\w+)")


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
class _Name:
    """A name as the user wrote it."""

    text: str
    path: str
    # A class, a test, or both with :: between them; the name of a test may have a :: in it, too.
    inner: str

    @classmethod
    def read(cls, text: str, root: Path, cwd: Path) -> _Name:
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


@dataclass(frozen=True)
class Selection:
    """The selection of the user, applied in two steps: to files before they are imported, to tests afterwards."""

    included: tuple[_Name, ...]
    excluded: tuple[_Name, ...]
    matches: tuple[Matches, ...]
    marks: tuple[MatchesMarks, ...] = ()
    # The beginnings of the ids of tests that do not run.
    deselected: tuple[str, ...] = ()
    # They are skipped.
    disabled: tuple[DisabledTest, ...] = ()

    @classmethod
    def of(cls, options: Options, root: Path, cwd: Path) -> Selection:
        """The selection that the options describe. Raises UsageError."""

        def read(names: Iterable[str]) -> tuple[_Name, ...]:
            return tuple(_Name.read(name, root, cwd) for name in names)

        return cls(
            included=read((*options.names, *options.include)),
            excluded=read(options.exclude),
            matches=tuple(parse_expression(text) for text in options.keyword),
            marks=tuple(parse_marks(text) for text in options.marks),
            deselected=options.deselect,
            disabled=_disabled(options.disabled),
        )

    def files(self, known: Sequence[str]) -> tuple[str, ...]:
        """The files to import. Raises UsageError."""
        selected = set() if self.included else set(known)
        for name in self.included:
            selected.update(_files(name, known))
        for name in self.excluded:
            if not name.inner:
                selected.difference_update(_files(name, known))
        return tuple(file for file in known if file in selected)

    def tests(self, known: Sequence[Test], files: Sequence[str]) -> tuple[Test, ...]:
        """The tests to run, of those in imported files; broken and unselected files have none. Raises UsageError."""
        return tuple(test for test, why in self.decisions(known, files) if not why)

    def decisions(self, known: Sequence[Test], files: Sequence[str]) -> Iterator[tuple[Test, str]]:
        """Each test, with the option that leaves it out; with none if it is to run. Raises UsageError."""
        included = [_predicate(name, known, files, or_unknown=True) for name in self.included]
        excluded = [_predicate(name, known, files, or_unknown=False) for name in self.excluded]

        def why_not(test: Test) -> str:
            if included and not any(matches(test.id) for matches in included):
                return "by name"
            if any(matches(test.id) for matches in excluded):
                return "--exclude"
            if str(test.id).startswith(self.deselected):
                return "--deselect"
            if not self._keyword_selects(test.id):
                return "-k"
            return "" if self._marks_select(test) else "-m"

        for test in known:
            yield test, why_not(test)

    def without_disabled(self, tests: tuple[Test, ...], kind: str | None) -> tuple[Test, ...]:
        """The tests, of which those that are disabled are skipped. `kind`: of the accelerators of the run."""
        if not self.disabled:
            return tests
        from .disabled_tests import without_disabled

        return without_disabled(tests, self.disabled, kind)

    def gone(self, tests: Sequence[Test], files: Sequence[str]) -> tuple[str, ...]:
        """A warning for each disabled test that no imported file has any more."""
        if not self.disabled:
            return ()
        from .disabled_tests import stale

        return tuple(stale(self.disabled, tests, files))

    def _keyword_selects(self, test: TestId) -> bool:
        if not self.matches:
            return True
        return any(matches(test) for matches in self.matches)

    def _marks_select(self, test: Test) -> bool:
        if not self.marks:
            return True
        return any(matches(test) for matches in self.marks)

    def may_select_from(self, file: str, source: str) -> bool:
        """Whether a file that cannot be imported may have a test that -k and -m select, by the names in its source."""
        classes = ("", *_CLASS.findall(source))
        functions = ("", *_FUNCTION.findall(source))
        tests = [TestId(file, cls, name) for cls in classes for name in functions]
        if not any(self._keyword_selects(test) for test in tests):
            return False
        marks = tuple(_MARK.findall(source))
        without_marks = Test(tests[0], marks=())
        with_all_marks = Test(tests[0], marks=marks)
        return self._marks_select(without_marks) or self._marks_select(with_all_marks)


def _disabled(lists: Sequence[Path]) -> tuple[DisabledTest, ...]:
    if not lists:
        return ()
    from .disabled_tests import read_lists

    return read_lists(lists)


# -- files


def _files(name: _Name, known: Sequence[str]) -> tuple[str, ...]:
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


# -- tests


def _predicate(
    name: _Name,
    known: Sequence[Test],
    files: Sequence[str],
    or_unknown: bool,
) -> Callable[[TestId], bool]:
    """`or_unknown`: a file that skips all of its tests may have the test, so it is selected."""
    in_files = frozenset(_files(name, files))
    if not name.inner:
        return lambda test: test.file in in_files
    candidates = []
    skipped = set()
    for test in known:
        if test.id.file not in in_files:
            continue
        if test.id.method:
            candidates.append(test.id)
        elif or_unknown:
            skipped.add(test.id)
    tests = _meant(name.inner, candidates)
    if tests:
        return (tests | skipped).__contains__
    files_with_tests = {test.file for test in candidates}
    if in_files - files_with_tests:
        # The test may be in a file whose tests are unknown: it is broken or skips them all.
        return skipped.__contains__
    names: list[str] = []
    for candidate in candidates:
        names += _parts_of(candidate)
    alike = nearest(name.inner, names)
    raise UsageError(f"{name.text}: no test in these files has this name or starts with it.{alike}")


def _meant(inner: str, candidates: Sequence[TestId]) -> set[TestId]:
    """The tests of exactly this name; else of pytest with any parameters; else those whose name begins so."""

    def has_name(part: str) -> bool:
        return part == inner

    def has_name_and_parameters(part: str) -> bool:
        return part.startswith(f"{inner}[")

    def begins_so(part: str) -> bool:
        return part.startswith(inner)

    for is_meant in (has_name, has_name_and_parameters, begins_so):
        tests = set()
        for test in candidates:
            if any(is_meant(part) for part in _parts_of(test)):
                tests.add(test)
        if tests:
            return tests
    return set()


def _parts_of(test: TestId) -> tuple[str, ...]:
    """The names that the user may write after the file: the class, the test, or both."""
    if not test.cls:
        return (test.method,)
    return (test.cls, test.method, f"{test.cls}::{test.method}")
