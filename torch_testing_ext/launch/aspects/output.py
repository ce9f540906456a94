"""Output: what is said of ranks that have passed."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from torch_testing_ext._process.notes import warn_user
from torch_testing_ext.launch.attempts import Aspect, RanksEnd
from torch_testing_ext.launch.verdict import Outcome, RankReport

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt


class RankWarning(UserWarning):
    """Something to know although the test passes."""


def print_leftovers(name: str, reports: Iterable[RankReport]) -> None:
    """Name the processes that ranks have left running although the test passed."""
    for report in reports:
        if report.leftovers:
            left = "; ".join(report.leftovers)
            print(f"{name}: rank {report.rank} left running (now terminated): {left}", file=sys.stderr)


def show_to_user(text: str) -> None:
    """Warn the user; in pytest, which hides what a test that passes prints, by a warning of Python's, too."""
    warn_user(text)
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        # A filter that makes warnings errors means those of the test.
        with suppress(RankWarning):
            warnings.warn_explicit(text, RankWarning, "torch_testing_ext", 1)


say_once = functools.cache(show_to_user)


class RankOutput(Aspect):
    """Names what the ranks of a test that passed have left running."""

    name = "output"

    def finish(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        if attempt.is_first and end.verdict.outcome is Outcome.PASSED:
            print_leftovers(attempt.plan.case.name, end.reports)
        return end


OUTPUT = RankOutput()
