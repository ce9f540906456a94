"""Checks of the results: a planned test that has none, a result that no plan has."""

import re
from collections.abc import Iterable

from torch_testing_ext._process.words import count, first_names
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import Attempt, FinishedTest, Summary, TestEnd

from .plan import Plan

NO_RESULT = "the runner lost this test: it was planned, but has no result (a bug in the runner)"

_ABOUT_DEVICES = re.compile(r"\b(cuda|gpus?|accelerators?|nccl|xpu|rocm|hip)\b", re.IGNORECASE)
# Names in the warning.
_MOST_NAMED = 3
_NO_RESULT = (TestOutcome.SKIPPED, TestOutcome.ERROR, TestOutcome.FAILED)


def without_result(plan: Plan, summary: Summary) -> tuple[FinishedTest, ...]:
    """An error for each test of a plan that has no result, although the run was neither stopped nor interrupted.

    No way is known to lose a test; one that is lost must not be taken for one that has passed.
    """
    finished = {(result.test.id, result.last.repetition) for result in summary.finished}
    unfinished = {test.id for test in summary.unfinished}
    planned = []
    for unit in plan.units:
        planned += [(test, unit.repetition) for test in unit.tests]
    planned += [(test, 0) for test in plan.skipped]
    lost = []
    for test, repetition in planned:
        has_result = (test.id, repetition) in finished
        if not has_result and test.id not in unfinished:
            attempt = Attempt(test, TestEnd(TestOutcome.ERROR, NO_RESULT), repetition=repetition)
            lost.append(FinishedTest((attempt,)))
    return tuple(lost)


def describe_undeclared(finished: Iterable[FinishedTest]) -> str | None:
    """The warning about tests that leased no device, and then were skipped or failed with words about devices."""
    # Once, also if it is repeated.
    unique: dict[str, None] = {}
    for result in finished:
        if _may_lack_a_device(result):
            unique[str(result.test.id)] = None
    if not unique:
        return None
    names = list(unique)
    return (
        f"{count(len(names), 'test')} may need devices, but declared none and so saw none (declare them, for example "
        f"by @skip_if_lt_x_gpu(1)): {first_names(names, _MOST_NAMED)}"
    )


def _may_lack_a_device(result: FinishedTest) -> bool:
    if result.outcome not in _NO_RESULT:
        return False
    if result.test.devices or not result.test.id.method:
        return False
    if result.last.end.want is not None or result.test.skip is not None:
        # It was skipped before it could run.
        return False
    return bool(_ABOUT_DEVICES.search(result.last.said))
