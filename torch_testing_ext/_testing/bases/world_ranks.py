"""Tests in ranks that run in a whole world instead: each rank in a fork, without communication, one after the other."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._collectives.worlds.world_views import HAS_NO_RANKS, not_in_world
from torch_testing_ext._machine.random_state import set_rng_seed
from torch_testing_ext._testing.bases.ranked_test_case import RankedTestCase
from torch_testing_ext._testing.marks.needs import SKIP_BY_CODE, Skipped
from torch_testing_ext._testing.marks.settings_of_tests import WHOLE_WORLD
from torch_testing_ext.launch import RankEnding, launch_settings
from torch_testing_ext.launch.attempts import Host, HostKind, RankAttempt, RanksEnd

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
__tracebackhide__ = True

# Whoever overrides one of these starts ranks, or judges them, in a way of its own.
_OF_OTHER_RANKS = ("_start_processes", "_join_processes", "_check_return_codes", "run_test_with_threaded_pg")


def not_run(size: int, why: str) -> unittest.SkipTest:
    """The skip of a test that cannot run in a whole world. `why`: a verb with its object."""
    return unittest.SkipTest(not_in_world(size, why))


def require_ranks(test: unittest.TestCase | None, function: Any) -> None:
    """Skip a test that has no ranks. `test`: the case of unittest, if it is one."""
    size = launch_settings.read_settings().world
    if size is not None and not isinstance(test, RankedTestCase) and not hasattr(function, WHOLE_WORLD):
        raise not_run(size, HAS_NO_RANKS)


class KeptAccount(launch.AccountWriter):
    """The account of a rank that is not started by a launcher: it keeps the exception."""

    def __init__(self) -> None:
        super().__init__(None)
        self._error: BaseException | None = None

    def failed(self, error: BaseException, assertion: bool, within: str = "", traceback: str | None = None) -> None:
        self._error = self._error or error
        super().failed(error, assertion, within, traceback)

    def raise_error(self) -> None:
        """Raise what has ended the test, if anything has."""
        if self._error is not None:
            raise self._error
        if self.account is not None and self.account.ending is RankEnding.SKIPPED:
            raise unittest.SkipTest(self.account.summary)


class WorldRanks(Host):
    """A test as each rank of a world, without communication. What is wrong with it is raised where it is waited for."""

    kind = HostKind.WORLD

    def __init__(self, body: Callable[[launch.RankContext], object], inherited: Any = None, why_not: str = ""):
        """`inherited`: for the contexts of the ranks. `why_not`: a verb with its object, why the test cannot run."""
        self._body = body
        self._inherited = inherited
        self._why_not = why_not

    def refusal(self, what: str, why: str) -> Exception:
        size = launch_settings.read_settings().world
        assert size is not None
        return not_run(size, why)

    def start(self, attempt: RankAttempt) -> None:
        """Do nothing: all ranks run while they are waited for."""

    def judge(self, attempt: RankAttempt) -> RanksEnd:
        size = attempt.settings.world
        assert size is not None
        if self._why_not:
            raise not_run(size, self._why_not)

        # With the rules of collectives.
        from torch_testing_ext._testing.bases import whole_worlds

        def body(rank: int) -> None:
            self._run(rank, size, attempt.directory)

        ranks = whole_worlds.run_ranks(body, size, _TIMEOUT, is_test=True)
        whole_worlds.judge_ranks(ranks)
        return RanksEnd((), launch.Verdict(launch.TestOutcome.PASSED))

    def _run(self, rank: int, size: int, directory: Path) -> None:
        account = KeptAccount()
        context = launch.RankContext(rank, size, directory, account, inherited=self._inherited)
        context.enter()
        # As in every rank of a test.
        set_rng_seed()
        try:
            self._body(context)
        except SystemExit as leaving:
            account.raise_error()
            skip = SKIP_BY_CODE.get(leaving.code) if isinstance(leaving.code, int) else None
            if skip is not None:
                raise Skipped(skip) from None
            raise RuntimeError(f"the test has exited with {leaving.code!r}") from None
        account.raise_error()


# In seconds, of each rank.
_TIMEOUT = 60.0


def why_not_in_world(test: RankedTestCase) -> str:
    """Why a test case cannot run in a whole world, as a verb with its object; "" if it can."""
    return f"starts or judges its ranks itself: {type(test).__qualname__}" if test._overrides(*_OF_OTHER_RANKS) else ""
