"""The verdict on ranks as an exception of the test."""

import functools
import unittest
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch_testing_ext import launch
from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._testing.marks.needs import TEST_SKIPS, Skipped, TestSkip
from torch_testing_ext._tests import kept_failures
from torch_testing_ext.launch.user_warnings import show_to_user

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


class _Judged:
    """An exception that carries the verdict on a test."""

    cause_of_failure = launch.Cause.OWN
    # If it was judged.
    failure: FailureView | None = None

    @property
    def account(self) -> str:
        """All that is known of the failure, as a text."""
        return self.failure.account if self.failure is not None else ""


# PyTorch's bases raise RuntimeError for an exception in a rank, even for a failed assertion, and AssertionError for an
# exit code. Ours derive from both, for tests that catch either. To unittest, a RankError is still an error: see below.
class RankError(_Judged, RuntimeError, AssertionError):
    """A rank raised, crashed, hung or got lost. The message covers all ranks."""

    outcome = launch.TestOutcome.ERROR


class RankFailure(_Judged, AssertionError, RuntimeError):
    """An assertion failed in a rank, or the ranks disagree. The message covers all ranks."""

    outcome = launch.TestOutcome.FAILED


for _public in (RankError, RankFailure):
    _public.__module__ = f"{__name__.partition('.')[0]}.common_distributed"


AnyError = TypeVar("AnyError", RankError, RankFailure)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Interrupted(Exception):
    """Ctrl-C was pressed while ranks were running; they have been killed."""


def rank_error(verdict: launch.Verdict, test: unittest.TestCase | None = None) -> RankError:
    """Make the exception for a verdict that is an error; `test` is the one that will raise it."""
    error = _with_account(RankError(verdict.message), verdict)
    if test is not None and test.failureException is AssertionError:
        # To unittest, an exception that derives from this is a failure, any other an error.
        test.failureException = RankFailure
    return error


def told_briefly(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let the function raise errors about ranks without our frames: their messages are complete.

    unittest shows all frames below the first one of a test file.
    """

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return function(*arguments, **options)
        except (launch.CannotStart, RankError) as error:
            raise error.with_traceback(None) from None

    return call


def raise_verdict(verdict: launch.Verdict, name: str = "", test: unittest.TestCase | None = None) -> None:
    """Raise the exception for the verdict on `test`, or on ranks that have no test case, unless they passed.

    `name` begins what is said of ranks that passed.
    """
    __tracebackhide__ = True
    match verdict.outcome:
        case launch.TestOutcome.PASSED:
            if verdict.message:
                show_to_user(f"{name}: {verdict.message}" if name else verdict.message)
        case launch.TestOutcome.SKIPPED:
            raise Skipped(TestSkip(verdict.code or TEST_SKIPS["generic"].exit_code, verdict.message))
        case launch.TestOutcome.FAILED:
            raise _with_account(RankFailure(verdict.message), verdict)
        case _:
            raise rank_error(verdict, test)


def _with_account(error: AnyError, verdict: launch.Verdict) -> AnyError:
    """Add what the verdict says to its exception. The account is kept in a file unless a runner keeps it."""
    if verdict.kept_as:
        kept_failures.keep_report(verdict.kept_as, verdict.account)
    error.outcome, error.cause_of_failure, error.failure = verdict.outcome, verdict.cause, verdict.failure
    return error
