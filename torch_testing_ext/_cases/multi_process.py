"""MultiProcessTestCase: a test method that runs once in each of `world_size` fresh processes.

In the parent, another method replaces it, which waits for the ranks and raises their common verdict.
In a rank, only the method itself runs, and the cleanups that it registers.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing.connection
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_testing_ext import launch
from torch_testing_ext._asserts import expectations
from torch_testing_ext._machine.seeds import set_rng_seed
from torch_testing_ext._marks.needs import SKIP_BY_CODE, Skipped, TestSkip

from . import foreign_ranks, invocation, launched_ranks, passed_warnings
from .accounting import account_for, ran
from .process_case import ProcessRanksTestCase
from .rank_life import leave_process_group, run_rank
from .rank_process import PipeFromRank, PipeToParent, RankEvent, RankProcess, UnstartedRank, account_behind
from .ranked import own_cleanups
from .verdicts import print_leftovers, raise_verdict

if TYPE_CHECKING:
    from torch_testing_ext.launch.rounds import Round

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# Does the same in pytest.
__tracebackhide__ = True


class MultiProcessTestCase(ProcessRanksTestCase):
    """A test case whose test methods run in fresh processes, one for each rank; `setUp` must start them."""

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

    _launched: launch.Run | None = None
    _directory: Path | None = None
    _skip: TestSkip | None = None
    _verdict = launch.Verdict(launch.Outcome.PASSED)

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

    def _spawn_processes(self) -> None:
        """Start the ranks, unless it is certain that all would skip: then the test skips, like theirs, when it runs."""
        if self._directory is None:
            raise self._error(f"{type(self).__qualname__}.setUp() must call super().setUp() first")
        # The first ranks would be forgotten.
        if self.processes or self._round is not None:
            raise self._error(f"{type(self).__qualname__}.setUp() starts ranks twice: super().setUp() does so")
        self._skip = self._known_skip()
        if self._skip is None and launch.this_launch() is not None:
            self._round = self._begin_round(self._checked_world_size(), self._directory)
            self.file_name = str(Path(self._round.directory, "store"))
        elif self._skip is None:
            self._start_processes(torch.multiprocessing.get_context("spawn").Process)
        else:
            # A world size is made of the devices that are missing.
            with suppress(Exception):
                ranks = range(int(self.world_size))
                self.processes = [UnstartedRank(rank, self._skip.exit_code) for rank in ranks]

    def _start_processes(self, proc: Any) -> None:
        """Start the ranks. `proc`, a class of processes, is for an override that starts them itself."""
        assert self._directory is not None
        self._start_ranks(self._checked_world_size(), self._directory)

    def _start_ranks(self, world_size: int, directory: Path) -> None:
        """Start the ranks of the test, which runs in them by `_run`."""
        job = self._job(
            _run_rank,
            world_size,
            directory,
            self.addCleanup,
            arguments={
                "test_name": self._current_test_name(),
                "file_name": self.file_name,
                "options": self._options_of_run(),
            },
            skips={code: skip.message for code, skip in SKIP_BY_CODE.items()},
            sanitize=self._sanitize(),
        )
        self._launched = launch.launch(job)
        self.processes = [RankProcess(self._launched, rank) for rank in range(world_size)]
        self.pid_to_pipe = {}
        for rank, pid in enumerate(self._launched.pids):
            self.pid_to_pipe[pid] = PipeFromRank(self._launched, rank)

    def _run_in_place(self, together: Round) -> launch.Verdict:

        def body(context: launch.RankContext) -> None:
            options = self._options_of_run()
            pipe = _pipe_of(context, type(self))
            self._run(context.rank, self._current_test_name(), self.file_name, pipe, **options)

        verdict = launched_ranks.run(together, body)
        launched_ranks.stop_if_asked(self._result)
        if launched_ranks.is_first():
            verdict = self._with_expectations(verdict, self.file_name, self._checked_world_size())
        return verdict

    def _join_processes(self, fn: Callable[[], Any]) -> None:
        """Wait for the ranks, and raise the exception for their verdict."""
        if self._skip is not None:
            raise Skipped(self._skip)
        began = launch.now()
        if self._round is not None:
            self._verdict = self._run_in_place(self._round)
        elif self._launched is None and self.processes:
            self._verdict = foreign_ranks.verdict(
                self.processes,
                self.pid_to_pipe,
                self._timeout(),
                self._expected(fn),
                self._case(),
                self._get_timedout_process_traceback,
            )
        else:
            verdict = self._wait_for_verdict(fn)
            assert self._launched is not None
            self._verdict = self._with_expectations(verdict, self.file_name, self._launched.job.world_size)
        self._check_return_codes(fn, launch.now() - began)

    def _get_timedout_process_traceback(self) -> None:
        """For subclasses: called at the time-out, while ranks still run. Their stacks are in the failure anyway.

        An override may get the stacks of a rank from its pipe in `pid_to_pipe`: it sends `Event.GET_TRACEBACK`, and
        receives a text.
        """

    def _check_return_codes(self, fn: Callable[[], Any], elapsed_time: float) -> None:
        """Raise the exception for the verdict on the ranks, which have ended. An override may judge exit codes."""
        raise_verdict(self._verdict, self.id(), self)

    def _wait_for_verdict(self, fn: Callable[[], Any]) -> launch.Verdict:
        """Wait for the ranks that this test has started, and judge them."""
        if self._launched is None:
            setup = f"{type(self).__qualname__}.setUp()"
            raise self._error(f"no ranks were started: {setup} must call self._spawn_processes()")
        expected = self._expected(fn)
        with self._interruptible():
            outcome = launch.watch(self._launched, self._timeout(), expected, self._get_timedout_process_traceback)
        verdict = outcome.verdict(self._case())
        passed_warnings.warn_again(outcome.reports, filtered=verdict.outcome is launch.Outcome.PASSED)
        if invocation.verdict_note is not None:
            note = invocation.verdict_note(outcome.reports, expected, verdict)
            if note:
                verdict = verdict.with_note(note)
        if verdict.outcome is launch.Outcome.PASSED:
            print_leftovers(self._short_name(), outcome.reports)
        return verdict

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
        if self._launched is not None and self._launched.alive:
            launch.end(self._launched)
        elif self._launched is None:
            foreign_ranks.end(getattr(self, "processes", ()))
        self._launched = None
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
        with passed_warnings.recorded(context.account):
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
    ran(test())
    if context is not None:
        context.account.test_returned()
