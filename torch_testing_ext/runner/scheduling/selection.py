"""The choice of files and tests by name, keyword and mark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_testing_ext.runner.model import Test, TestId
from torch_testing_ext.runner.options import Options

from .expressions import Matches, MatchesMarks, parse_expression, parse_marks
from .named_files import NameByUser, files_of
from .named_tests import predicate

if TYPE_CHECKING:
    from .disabled_tests import DisabledTest

_CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*(?:async )?def (\w+)", re.MULTILINE)
_MARK = re.compile(r"\bmark\.(\w+)")


@dataclass(frozen=True)
class Selection:
    """The selection of the user, applied in two steps: to files before they are imported, to tests afterwards."""

    included: tuple[NameByUser, ...]
    excluded: tuple[NameByUser, ...]
    matches: tuple[Matches, ...]
    marks: tuple[MatchesMarks, ...] = ()
    # The beginnings of the ids of tests that do not run.
    deselected: tuple[str, ...] = ()
    # They are skipped.
    disabled: tuple[DisabledTest, ...] = ()

    @classmethod
    def of(cls, options: Options, root: Path, cwd: Path) -> Selection:
        """The selection that the options describe. Raises UsageError."""

        def read(names: Iterable[str]) -> tuple[NameByUser, ...]:
            return tuple(NameByUser.read(name, root, cwd) for name in names)

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
            selected.update(files_of(name, known))
        for name in self.excluded:
            if not name.inner:
                selected.difference_update(files_of(name, known))
        return tuple(file for file in known if file in selected)

    def tests(self, known: Sequence[Test], files: Sequence[str]) -> tuple[Test, ...]:
        """The tests to run, of those in imported files; broken and unselected files have none. Raises UsageError."""
        return tuple(test for test, why in self.decisions(known, files) if not why)

    def decisions(self, known: Sequence[Test], files: Sequence[str]) -> Iterator[tuple[Test, str]]:
        """Each test, with the option that leaves it out; with none if it is to run. Raises UsageError."""
        included = [predicate(name, known, files, or_unknown=True) for name in self.included]
        excluded = [predicate(name, known, files, or_unknown=False) for name in self.excluded]

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
