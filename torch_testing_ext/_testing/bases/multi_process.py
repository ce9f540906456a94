"""MultiProcessTestCase: a test method that runs once in each of `world_size` fresh processes.

In the parent, another method replaces it, which waits for the ranks and raises their common verdict. In a rank,
only the method itself runs, and the cleanups that it registers.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing.connection
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from torch_testing_ext import launch
from torch_testing_ext._machine.random_state import set_rng_seed
from torch_testing_ext._testing.bases import launched_ranks, own_ranks
from torch_testing_ext._testing.bases.own_ranks import end_own_ranks
from torch_testing_ext._testing.bases.process_ranks_test_case import ProcessRanksTestCase
from torch_testing_ext._testing.bases.rank_accounts import account_for, refuse_what_ran_nothing
from torch_testing_ext._testing.bases.rank_handles import (
    PipeFromRank,
    PipeToParent,
    RankEvent,
    RankProcess,
    UnstartedRank,
    account_behind,
)
from torch_testing_ext._testing.bases.rank_life import leave_process_group, run_rank
from torch_testing_ext._testing.bases.rank_verdicts import raise_verdict, told_briefly
from torch_testing_ext._testing.bases.ranked_test_case import own_cleanups
from torch_testing_ext._testing.bases.world_ranks import WorldBody, WorldRanks, why_not_in_world
from torch_testing_ext._testing.helpers import expectations
from torch_testing_ext._testing.marks.needs import SKIP_BY_CODE, Skipped, TestSkip
from torch_testing_ext.launch.aspects import warnings_in_rank
from torch_testing_ext.launch.attempts import Host, ProcessHost, RankAttempt, RanksEnd
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.session import Session
from torch_testing_ext.launch.watching.evidence import RankEvidence

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


class MultiProcessTestCase(ProcessRanksTestCase):
    """A test case whose test methods run in fresh processes, one for each rank.

    class ReduceTest(MultiProcessTestCase):
        def setUp(self):
            super().setUp()
            self._spawn_processes()
    """

    _DECIDES_ABOUT_SKIPS = (
        *ProcessRanksTestCase._DECIDES_ABOUT_SKIPS,
        *("_run", "run_test", "join_or_run", "init_pg"),
        *("_start_processes", "_join_processes", "_check_return_codes"),
    )

    TEST_ERROR_EXIT_CODE = launch.ERROR_EXIT_CODE

    # Set by setUp: ranks have only `file_name`.
    file_name: str
    processes: list[Any]
    pid_to_pipe: dict[int, Any]

    _directory: Path | None = None
    _skip: TestSkip | None = None
    _verdict = launch.Verdict(launch.TestOutcome.PASSED)

    # -- for subclasses to override

    @property
    def destroy_pg_upon_exit(self) -> bool:
        return True

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    def _current_test_name(self) -> str:
        return self.id().split(".")[-1]

    def _name_in_ranks(self) -> str:
        return self._current_test_name()

    def _should_stop_test_suite(self) -> bool:
        return False

    def join_or_run(self, fn: Callable[[], Any]) -> Any:
        """Return the method that replaces a test: in the parent it waits for the ranks, in a rank it runs the test."""

        @functools.wraps(fn)
        def wrapper(self: MultiProcessTestCase) -> None:
            if self.rank == self.MAIN_PROCESS_RANK:
                self._join_processes(fn)
            else:
                _run_in_rank(fn)

        return types.MethodType(wrapper, self)

    # -- the parent

    @told_briefly
    def setUp(self) -> None:
        super().setUp()
        self.special_return_code_checks: dict[Any, int] = {}
        self.skip_return_code_checks: list[Any] = []
        self.processes = []
        self.rank = self.MAIN_PROCESS_RANK
        self.pid_to_pipe = {}
        self._directory = launch.new_directory(self.id())
        # The ranks end also if setUp fails later, or if tearDown does not call super().
        self.addCleanup(self._end_ranks)
        store = self._directory / "store"
        store.touch()
        self.file_name = str(store)

    def tearDown(self) -> None:
        super().tearDown()
        self._end_ranks()

    @told_briefly
    def _spawn_processes(self) -> None:
        """Start the ranks, unless it is certain that all would skip: then the test skips, like theirs, when it runs."""
        if self._directory is None:
            raise self._error(f"{type(self).__qualname__}.setUp() must call super().setUp() first")
        # The first ranks would be forgotten.
        if self.processes or self._session is not None:
            raise self._error(f"{type(self).__qualname__}.setUp() starts ranks twice: super().setUp() does so")
        self._skip = self._skip_before_ranks()
        if self._skip is not None:
            # A world size is made of the devices that are missing.
            with suppress(Exception):
                ranks = range(int(self.world_size))
                self.processes = [UnstartedRank(rank, self._skip.exit_code) for rank in ranks]
            return
        session = self._open_session(_FreshRanks(self), self._directory)
        if session.host.kind is HostKind.FRESH:
            self._start_processes(torch.multiprocessing.get_context("spawn").Process)
        else:
            session.begin()

    def _start_processes(self, proc: Any) -> None:
        """Start the ranks. `proc`, a class of processes, is for an override that starts them itself."""
        # An override of _spawn_processes calls this at once.
        session = self._session or self._open_session(_FreshRanks(self), self._directory)
        session.begin()

    def _join_processes(self, fn: Callable[[], Any]) -> None:
        """Wait for the ranks, and raise the exception for their verdict."""
        if self._skip is not None:
            raise Skipped(self._skip)
        began = launch.now()
        session = self._session_with_ranks()
        self._verdict = session.finish(self._expected(fn), self._timeout())
        self._check_return_codes(fn, launch.now() - began)

    def _session_with_ranks(self) -> Session:
        """The session of this test, with its ranks: also with those that the class has started itself."""
        session = self._session
        if session is None and self.processes:
            session = self._open_session(_FreshRanks(self), self._directory)
        if session is None:
            setup = f"{type(self).__qualname__}.setUp()"
            raise self._error(f"no ranks were started: {setup} must call self._spawn_processes()")
        if not session.has_begun:
            session.host = _OwnRanks(self)
            session.begin()
        return session

    def _get_timedout_process_traceback(self) -> None:
        """For subclasses: called at the time-out, while ranks still run. Their stacks are in the failure anyway.

        An override may get the stacks of a rank from its pipe in `pid_to_pipe`: it sends `Event.GET_TRACEBACK`, and
        receives a text.
        """

    def _check_return_codes(self, fn: Callable[[], Any], elapsed_time: float) -> None:
        """Raise the exception for the verdict on the ranks, which have ended. An override may judge exit codes."""
        raise_verdict(self._verdict, self.id(), self)

    def _expected(self, fn: Callable[[], Any]) -> launch.Expected:
        return launch.Expected(
            fn in self.skip_return_code_checks,
            self.special_return_code_checks.get(fn),
            self._collectives_may_differ(),
        )

    def _options_of_run(self) -> dict[str, Any]:
        return _accepted_by(self._run, {"fake_pg": getattr(self, "fake_pg", False)})

    def _end_ranks(self) -> None:
        """End the processes that are left of this test, and remove its files."""
        # The same instance may run again.
        session, self._session = self._session, None
        if session is not None:
            session.close()
        end_own_ranks([process for process in getattr(self, "processes", ()) if not isinstance(process, RankProcess)])
        self.processes = []
        if self._directory is not None:
            launch.discard(self._directory)

    # -- a rank

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.run_test(test_name, pipe)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """Run the test method in this rank; `parent_pipe` is what `_run` was given.

        Raise SystemExit if the test does not pass, so that an overriding `_run` does not continue.
        """
        account = account_behind(parent_pipe)
        # An overriding `_run` need not set it.
        if (file_name := getattr(self, "file_name", None)) is not None:
            self._recorder = expectations.ExpectationRecorder(file_name, self.rank)
        set_rng_seed()
        try:
            with own_cleanups(self, account):
                getattr(self, test_name)()
        except Exception as error:
            sys.exit(account_for(account, error, self.failureException))
        account.finished = True
        if self.destroy_pg_upon_exit:
            leave_process_group(self.fast_exit and not account.is_provisional)

    # -- for a copy of PyTorch's run_test

    Event = RankEvent

    @staticmethod
    def _event_listener(parent_pipe: Any, signal_pipe: Any, rank: int) -> None:
        """Wait until the test is over: our parent asks a rank in another way."""
        multiprocessing.connection.wait([signal_pipe])


class _FreshRanks(ProcessHost):
    """New ranks for one test of a class."""

    kind = HostKind.FRESH
    has_own_filters = True

    def __init__(self, test: MultiProcessTestCase):
        self._test = test

    def in_world(self, size: int) -> Host:
        return WorldRanks(WorldBody(self._run_in_world), why_not_in_world(self._test))

    def _run_in_world(self, context: launch.RankContext) -> None:
        """Run the test as a rank of a whole world: in a fork, so the class may be changed."""
        test, cls = self._test, type(self._test)
        cls.world_size = context.world_size  # type: ignore[assignment, method-assign]
        pipe = PipeToParent(context.account)
        store = str(context.directory / "store")
        cls._run(context.rank, test._testMethodName, store, pipe, **test._options_of_run())

    def in_place(self) -> Host:
        return _InPlace(self._test)

    def refusal(self, what: str, why: str) -> Exception:
        return self._test._error(f"{what}: {why}")

    def start(self, attempt: RankAttempt) -> None:
        test = self._test
        test.file_name = str(attempt.directory / "store")
        job = attempt.job(
            _run_rank,
            type(test),
            arguments={
                "test_name": test._current_test_name(),
                "file_name": test.file_name,
                "options": test._options_of_run(),
            },
            skips={code: skip.message for code, skip in SKIP_BY_CODE.items()},
        )
        run = self.run = launch.launch(job)
        test.processes = [RankProcess(run, rank) for rank in range(attempt.plan.world_size)]
        test.pid_to_pipe = {pid: PipeFromRank(run, rank) for rank, pid in enumerate(run.pids)}

    def watching(self) -> AbstractContextManager[None, bool | None]:
        return self._test._interruptible()

    def at_timeout(self) -> None:
        self._test._get_timedout_process_traceback()

    def complete(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        if attempt.plan.faults is not None:
            from torch_testing_ext.faults import Sweep

            if isinstance(attempt.plan.faults, Sweep):
                return end
        return self._test._with_expectations(end, self._test.file_name, attempt.plan.world_size)


class _OwnRanks(Host):
    """Processes that the class has started itself."""

    kind = HostKind.OWN

    def __init__(self, test: MultiProcessTestCase):
        self._test = test

    def refusal(self, what: str, why: str) -> Exception:
        return self._test._error(f"{what}: {why}")

    def start(self, attempt: RankAttempt) -> None:
        """Do nothing: the ranks are there."""

    def watching(self) -> AbstractContextManager[None, bool | None]:
        return self._test._interruptible()

    def watch(self, attempt: RankAttempt) -> RankEvidence:
        test = self._test
        return own_ranks.wait_for(
            test.processes,
            test.pid_to_pipe,
            attempt.timeout,
            attempt.expected,
            test._get_timedout_process_traceback,
        )


class _InPlace(launched_ranks.InPlace):
    """A test of a class in the ranks of a launcher."""

    def __init__(self, test: MultiProcessTestCase):
        super().__init__(self._run, test)
        self._case = test

    def start(self, attempt: RankAttempt) -> None:
        super().start(attempt)
        self._case.file_name = str(self.directory / "store")

    def _run(self, context: launch.RankContext) -> None:
        test, cls = self._case, type(self._case)
        pipe = _pipe_of(context, cls)
        cls._run(context.rank, test._current_test_name(), test.file_name, pipe, **test._options_of_run())

    def complete(self, attempt: RankAttempt, end: RanksEnd) -> RanksEnd:
        if not launched_ranks.is_first():
            return end
        return self._case._with_expectations(end, self._case.file_name, attempt.plan.world_size)


def _accepted_by(run: Callable[..., None], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that `run` accepts: an overriding `_run` may lack **kwargs."""
    takes = inspect.signature(run).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return options
    return {name: value for name, value in options.items() if name in takes}


def _run_rank(
    context: launch.RankContext,
    cls: type[MultiProcessTestCase],
    test_name: str,
    file_name: str,
    options: dict[str, Any],
) -> None:
    """The body of a rank.

    The parent passes everything that it can find out itself: in a forked rank, every look-up copies memory pages.
    """

    def body() -> None:
        with warnings_in_rank.recorded_warnings(context.account):
            cls._run(context.rank, test_name, file_name, _pipe_of(context, cls), **options)
        # A skip, whose sys.exit() an overriding `_run` has caught.
        if context.account.account is not None:
            context.account.passed()

    run_rank(context, body, ends_process=False, leaves_groups=False, reports_imports=True)


launch.Named.of(_run_rank)


def _pipe_of(context: launch.RankContext, cls: type[MultiProcessTestCase]) -> PipeToParent:
    context.account.is_provisional = cls._overrides("_run", "run_test")
    return PipeToParent(context.account)


def _run_in_rank(test: Callable[[], Any]) -> None:
    """Run the test method; the account learns when it is over, since code of the class may follow and end the rank."""
    context = launch.current_context()
    if context is not None:
        context.account.test_begins()
    refuse_what_ran_nothing(test())
    if context is not None:
        context.account.test_returned()
