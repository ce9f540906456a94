"""Changes between two runs, or two groups of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_testing_ext._process.words import count
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import TestId
from torch_testing_ext.runner.report import wording

from .results import RunResults, TestResult, name_of, require_one_project
from .run_file import BadResults

# A test is slower if it takes longer by both.
_SLOWER_TIMES = 1.5
_SLOWER_SECONDS = 1.0


@dataclass(frozen=True)
class Differences:
    """The tests that have changed."""

    new_failures: tuple[TestResult, ...]
    # They failed before, too.
    still_failing: tuple[TestResult, ...]
    mended: tuple[TestResult, ...]
    # They passed or failed before, and are skipped now.
    no_longer_run: tuple[TestResult, ...]
    # Before and after.
    slower: tuple[tuple[TestResult, TestResult], ...]
    gone: tuple[TestId, ...]
    new: tuple[TestResult, ...]


def differences(before: Sequence[RunResults], after: Sequence[RunResults]) -> Differences:
    """Compare runs. Raises BadResults if they have nothing in common."""
    require_one_project([*before, *after])
    old, now = _by_test(before), _by_test(after)
    if old and now and not old.keys() & now.keys():
        raise BadResults(f"{after[0].name} and {before[0].name} have no test in common: name runs of one project")
    failing = [result for result in now.values() if _fails(result)]
    both = [(old[test], result) for test, result in now.items() if test in old]
    return Differences(
        tuple(result for result in failing if not _fails(old.get(result.test))),
        tuple(result for result in failing if _fails(old.get(result.test))),
        tuple(result for was, result in both if _fails(was) and _passes(result)),
        tuple(result for was, result in both if not _is_skipped(was) and _is_skipped(result)),
        tuple(sorted(filter(_is_slower, both), key=lambda pair: pair[0].seconds - pair[1].seconds)),
        tuple(test for test in old if test not in now),
        tuple(result for test, result in now.items() if test not in old),
    )


def changes(found: Differences) -> dict[TestId, str]:
    """The news of each test that has changed, in words."""
    words = {result.test: "new test" for result in found.new}
    for what, results in (
        ("mended", found.mended),
        ("skipped now", found.no_longer_run),
        ("slower", [now for _, now in found.slower]),
        ("still failing", found.still_failing),
        ("new failure", found.new_failures),
    ):
        words.update((result.test, what) for result in results)
    return words


def _by_test(all_results: Sequence[RunResults]) -> Mapping[TestId, TestResult]:
    """The result of each test: its failure if it has failed anywhere, else a pass, else a skip."""
    found: dict[TestId, TestResult] = {}
    for results in all_results:
        for result in results.results:
            known = found.get(result.test)
            if known is None or _weight(result) > _weight(known):
                found[result.test] = result
    return found


def _weight(result: TestResult) -> int:
    return 2 if _fails(result) else int(_passes(result))


def _fails(result: TestResult | None) -> bool:
    return result is not None and result.counts_as is TestOutcome.FAILED


def _passes(result: TestResult) -> bool:
    return result.counts_as is TestOutcome.PASSED


def _is_skipped(result: TestResult) -> bool:
    return result.counts_as is TestOutcome.SKIPPED


def _is_slower(pair: tuple[TestResult, TestResult]) -> bool:
    was, now = pair
    took_longer = now.seconds > was.seconds * _SLOWER_TIMES and now.seconds - was.seconds > _SLOWER_SECONDS
    return took_longer and _passes(was) and _passes(now)


def difference_lines(found: Differences) -> Iterator[str]:
    """The differences in words."""
    for title, results in (("new failures", found.new_failures), ("still failing", found.still_failing)):
        yield from _section(title, [f"{name_of(result.test)}: {result.message}" for result in results])
    yield from _section("mended", [name_of(result.test) for result in found.mended])
    skips = [f"{name_of(result.test)}: {result.message}" for result in found.no_longer_run]
    yield from _section("skipped now", skips)
    slower = []
    for was, now in found.slower:
        took = f"{wording.duration(was.seconds)} -> {wording.duration(now.seconds)}"
        slower.append(f"{name_of(now.test)}: {took}")
    yield from _section("slower", slower)
    yield from _section("gone", [name_of(test) for test in found.gone])
    yield from _section("new", [f"{name_of(result.test)}: {result.outcome.value}" for result in found.new])
    new = count(len(found.new_failures), "new failure")
    yield f"{new}, {len(found.mended)} mended, {len(found.slower)} slower, {len(found.gone)} gone"


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield title
        yield from (f"  {line}" for line in lines)
        yield ""
