"""The tests that a name of the user means, in files that are imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_testing_ext._process.words import nearest
from torch_testing_ext.runner.model import Test, TestId
from torch_testing_ext.runner.options import UsageError

from .named_files import NameByUser, files_of


def predicate(
    name: NameByUser,
    known: Sequence[Test],
    files: Sequence[str],
    or_unknown: bool,
) -> Callable[[TestId], bool]:
    """Whether a name means a test. `or_unknown`: a file that skips all of its tests may have it, so it is selected."""
    in_files = frozenset(files_of(name, files))
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
