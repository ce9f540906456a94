"""The verdict on ranks as this process tells it: an exception for a failure, a line on stderr for the rest."""

import functools
import os
import sys
import unittest
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from torch_testing_ext import launch
from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._marks.needs import TEST_SKIPS, Skipped, TestSkip
from torch_testing_ext._process import kept_accounts
from torch_testing_ext._process.test_notes import warn_user

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


# PyTorch's bases raise RuntimeError for an exception in a rank, even for a failed assertion, and AssertionError for an
# exit code. Ours derive from both, for tests that catch either. To unittest, a RankError is still an error: see below.
class RankError(RuntimeError, AssertionError):
    """A rank raised, crashed, hung or got lost. The message covers all ranks."""

    outcome = launch.Outcome.ERROR
    cause_of_failure = launch.Cause.OWN
    # If it was judged.
    failure: FailureView | None = None

    @property
    def account(self) -> str:
        """All that is known of the failure, as a text."""
        return self.failure.account if self.failure is not None else ""


class RankFailure(AssertionError, RuntimeError):
    """An assertion failed in a rank, or the ranks disagree. The message covers all ranks."""

    outcome = launch.Outcome.FAILED
    cause_of_failure = launch.Cause.OWN
    failure: FailureView | None = None

    @property
    def account(self) -> str:
        """All that is known of the failure."""
        return self.failure.account if self.failure is not None else ""


for _public in (RankError, RankFailure):
    _public.__module__ = f"{__name__.partition('.')[0]}.common_distributed"


AnyError = TypeVar("AnyError", RankError, RankFailure)


class Interrupted(Exception):
    """Ctrl-C was pressed while ranks were running; they have been ended."""


class RankWarning(UserWarning):
    """Something to know although the test passes."""


def rank_error(verdict: launch.Verdict, test: unittest.TestCase | None = None) -> RankError:
    """Make the exception for a verdict that is an error; `test` is the one that will raise it."""
    error = _with_account(RankError(verdict.message), verdict)
    if test is not None and test.failureException is AssertionError:
        # To unittest, an exception that derives from this is a failure, any other an error.
        test.failureException = RankFailure
    return error


def raise_verdict(verdict: launch.Verdict, name: str = "", test: unittest.TestCase | None = None) -> None:
    """Raise the exception for the verdict on `test`, or on ranks that have no test case, unless they passed.

    `name` begins what is said of ranks that passed.
    """
    __tracebackhide__ = True
    match verdict.outcome:
        case launch.Outcome.PASSED:
            if verdict.message:
                say(f"{name}: {verdict.message}" if name else verdict.message)
        case launch.Outcome.SKIPPED:
            raise Skipped(TestSkip(verdict.code or TEST_SKIPS["generic"].exit_code, verdict.message))
        case launch.Outcome.FAILED:
            raise _with_account(RankFailure(verdict.message), verdict)
        case _:
            raise rank_error(verdict, test)


def _with_account(error: AnyError, verdict: launch.Verdict) -> AnyError:
    """Add what the verdict says to its exception. The account is kept in a file unless a runner keeps it."""
    if verdict.kept_as:
        kept_accounts.keep(verdict.kept_as, verdict.account)
    error.outcome, error.cause_of_failure, error.failure = verdict.outcome, verdict.cause, verdict.failure
    return error


def print_leftovers(name: str, reports: Iterable[launch.RankReport]) -> None:
    """Name the processes that ranks have left running although the test passed."""
    for report in reports:
        if report.leftovers:
            left = "; ".join(report.leftovers)
            print(f"{name}: rank {report.rank} left running (now terminated): {left}", file=sys.stderr)


def say(text: str) -> None:
    """Warn the user; in pytest, which hides what a test that passes prints, by a warning of Python's, too."""
    warn_user(text)
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        # A filter that makes warnings errors means those of the test.
        with suppress(RankWarning):
            warnings.warn_explicit(text, RankWarning, "torch_testing_ext", 1)


say_once = functools.cache(say)
