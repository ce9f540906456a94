"""MultiProcessTestCase, what it shares with persistent ranks, and what PyTorch's overriding sees."""

from __future__ import annotations

import enum
import functools
import inspect
import multiprocessing.connection
import os
import signal
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_testing_ext import launch
from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._machine.accelerators import set_rng_seed
from torch_testing_ext._testing.bases import invocation, launched_ranks
from torch_testing_ext._testing.bases.rank_accounts import account_for, refuse_what_ran_nothing
from torch_testing_ext._testing.bases.rank_life import leave_process_group, run_rank
from torch_testing_ext._testing.bases.rank_verdicts import Interrupted, raise_verdict, told_briefly
from torch_testing_ext._testing.bases.ranked_test_case import PARENT, RankedTestCase, own_cleanups
from torch_testing_ext._testing.bases.tests_in_ranks import expected_imports, job_for_test
from torch_testing_ext._testing.helpers import expectations
from torch_testing_ext._testing.marks.needs import SKIP_BY_CODE, Skipped, TestSkip
from torch_testing_ext._testing.marks.settings_of_tests import check_faults, faults_of_test, first_plan, refuse_faults
from torch_testing_ext.faults import FaultPlan, Sweep
from torch_testing_ext.launch import RankAccount, RankEnding, RankReport, environment
from torch_testing_ext.launch.aspects import rank_warnings
from torch_testing_ext.launch.aspects.output import print_leftovers
from torch_testing_ext.launch.rank_watch import FOREIGN_PROCESSES, RankEvidence, RankWatch, WatchAction

from .invocation import command_of

if TYPE_CHECKING:
    from torch_testing_ext.launch.coordinator import Round


# --------------------------------------------------------------------------------------------------------------------
# Ranks that a test starts itself, as processes of multiprocessing: waited for, ended, and judged like ours.
#
# A class does so by overriding `_start_processes`. Such a rank has no account: its exit code says how its test ended,
# and its pipe the exception.

__unittest = True


def verdict_on_foreign_ranks(
    processes: Sequence[Any],
    pipes: Mapping[int, Any],
    timeout: float | None,
    expected: launch.Expected,
    case: launch.Case,
    on_timeout: Callable[[], None],
) -> launch.Verdict:
    """Wait for these processes, end those that do not end, and judge all. `on_timeout` is called before the end."""
    ranks = _ForeignRanks(processes, pipes, timeout, expected)
    try:
        ranks.wait()
        if ranks.state.timed_out:
            on_timeout()
    finally:
        ranks.end()
    reports = tuple(ranks.report(rank) for rank in range(len(processes)))
    return RankEvidence(reports, ranks.state.timed_out, expected).verdict(case)


def end_foreign_ranks(processes: Sequence[Any]) -> None:
    """End the processes that are left: SIGTERM, then SIGKILL."""
    _ForeignRanks(processes, {}).end()


class _ForeignRanks:
    """Processes whose ends are awaited."""

    def __init__(
        self,
        processes: Sequence[Any],
        pipes: Mapping[int, Any],
        timeout: float | None = None,
        expected: launch.Expected | None = None,
    ):
        """`pipes`: from the ranks, by the numbers of their processes."""
        self.began = launch.now()
        self.state = RankWatch(range(len(processes)), FOREIGN_PROCESSES, expected, self.began, timeout)
        self._processes = processes
        self._open: dict[int, multiprocessing.connection.Connection] = {}
        for rank, process in enumerate(processes):
            pipe = pipes.get(process.pid)
            if isinstance(pipe, multiprocessing.connection.Connection):
                self._open[rank] = pipe
        # When we began to end each process that was there.
        self._stopped: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._texts: dict[int, str] = {}

    # -- until the test is over

    def wait(self) -> None:
        """Wait until all have ended, or for a while after one has failed."""
        # It moves on only when nothing else has happened.
        reached = self.began
        while True:
            step = self.state.step(reached)
            if step.action is not WatchAction.WAIT:
                return
            if self._wait_for_event(step.until):
                self._read_pipes()
                self._take_ends()
            else:
                reached = launch.now()

    def _wait_for_event(self, until: float | None) -> bool:
        seconds = None if until is None else max(0.0, until - launch.now())
        sentinels = [self._processes[rank].sentinel for rank in self.state.running]
        return bool(multiprocessing.connection.wait([*sentinels, *self._open.values()], seconds))

    def _take_ends(self) -> None:
        """Note the processes that have ended."""
        for rank in sorted(self.state.running):
            if self._processes[rank].exitcode is not None:
                self._ends[rank] = launch.now()
                self.state.on_end(self.report(rank), self._ends[rank])
                self.state.on_exit(rank)

    def _read_pipes(self) -> None:
        """Take the texts of exceptions, so that no rank waits for room in its pipe."""
        for rank, pipe in tuple(self._open.items()):
            try:
                while pipe.poll():
                    value = pipe.recv()
                    if isinstance(value, str):
                        self._texts[rank] = value
            except (EOFError, OSError):
                del self._open[rank]

    # -- the end of those that are left

    def end(self) -> None:
        """End the processes that are left."""
        self._stopped = dict.fromkeys(self._alive(), launch.now())
        self.state.give_up()
        while True:
            self._take_exits()
            step = self.state.step(launch.now())
            match step.action:
                case WatchAction.END:
                    self._send(signal.SIGTERM)
                    self.state.on_terminated(launch.now())
                case WatchAction.KILL:
                    self._send(signal.SIGKILL)
                    self.state.on_killed()
                case WatchAction.WAIT:
                    self._wait_for_exit(step.until)
                case _:
                    return

    def _alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def _take_exits(self) -> None:
        for rank in self.state.alive.difference(self._alive()):
            self.state.on_exit(rank)

    def _send(self, number: int) -> None:
        for rank in self._alive():
            # One that is no child of this process may just have ended.
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, number)

    def _wait_for_exit(self, until: float | None) -> None:
        for rank in self._alive():
            self._processes[rank].join(None if until is None else max(0.0, until - launch.now()))

    # -- reports

    def report(self, rank: int) -> RankReport:
        self._read_pipes()
        code = self._processes[rank].exitcode
        ended = self._ends.get(rank, launch.now())
        account = self._account(rank, code, ended)
        exit = launch.Exit(_status(code), ended)
        return launch.assemble_report(rank, account, exit, self.began, self._stopped.get(rank))

    def _account(self, rank: int, code: int | None, at: float) -> RankAccount | None:
        if code == 0:
            return RankAccount(RankEnding.PASSED, self.began, at)
        if code in SKIP_BY_CODE:
            return RankAccount(RankEnding.SKIPPED, self.began, at, SKIP_BY_CODE[code].message, code=code)
        text = self._texts.get(rank)
        if code == launch.ERROR_EXIT_CODE and text:
            summary = text.strip().splitlines()[-1]
            error = launch.RaisedError(cause=launch.cause_in(summary))
            return RankAccount(RankEnding.ERROR, self.began, at, summary, text, code, error=error)
        return None


def _status(code: int | None) -> int:
    """The wait status for an exit code of multiprocessing."""
    if code is None:
        return 0
    return -code if code < 0 else code << 8


# --------------------------------------------------------------------------------------------------------------------
# The common base of tests whose ranks are processes, fresh or persistent.
#
# The fork server of a test is forked before its setUp: ranks get the state that this process has then, not later. New
# processes lack what setUp leaves in the parent, so ranks must lack it, too.

# Keeps these frames out of tracebacks: the message is complete.


class ProcessRanksTestCase(RankedTestCase):
    """A test case whose ranks are processes of ours, or those of a launcher, in which the tests run in place."""

    MAIN_PROCESS_RANK = PARENT
    # A rank exits without destroying the gloo groups that it still has, which saves 10 ms a connection.
    fast_exit = True

    # In the ranks of a launcher.
    _round: Round | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_faults(cls)
        # A fork server that starts later finds the class by this.
        launch.Named.of(cls)

    @property
    def incarnation(self) -> int:
        """In a rank: how many processes of this rank have died by faults of the test before."""
        context = launch.current_context()
        return 0 if context is None else context.incarnation

    def _prepare_ranks(self) -> None:
        """Fork the server for the ranks of this test, unless it will start none."""
        # The error is raised again, and then shown, when setUp starts the ranks.
        with suppress(Exception):
            if launch.this_launch() is None and not self._is_rank() and not _skips_without_set_up(self):
                subject = launch.Named.of(type(self))
                launch.prepare(subject, expected_imports(subject.file or ""))

    @classmethod
    def _job(
        cls, body: Callable[..., None], world_size: int, directory: Path, add_cleanup: Callable[..., Any], **others: Any
    ) -> launch.Job:
        """Make the job of the ranks. Their ports are leased until the clean-up."""
        lease = environment.leased_variables(world_size, keep=True)
        addresses = lease.__enter__()
        add_cleanup(lease.__exit__, None, None, None)
        return job_for_test(body, world_size, directory, addresses, environment.read_settings(), cls, **others)

    def _begin_round(self, world_size: int, directory: Path) -> Round:
        """Begin the test in a process that a launcher has started as a rank, together with the others."""
        refuse_faults(self)
        may_differ, sanitize = self._collectives_may_differ(), self._sanitize()
        return launched_ranks.begin(world_size, self._case(), directory, self._timeout(), self, may_differ, sanitize)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let Ctrl-C stop the run so that unittest still prints its summary."""
        try:
            yield
        except KeyboardInterrupt:
            # pytest has another type of result.
            if not isinstance(self._result, unittest.TestResult):
                raise
            self._result.stop()
            self._result.interrupted = True  # type: ignore[attr-defined]
            raise Interrupted(f"{self._short_name()} was interrupted; its ranks have been ended") from None

    def _with_expectations(self, verdict: launch.Verdict, path: str, world_size: int) -> launch.Verdict:
        """Fail ranks that disagree about an expectation; when accepting, rewrite the source."""
        logs = {rank: Path(f"{path}{expectations.SUFFIX}{rank}") for rank in range(world_size)}
        logs = {rank: log for rank, log in logs.items() if log.exists()}
        if not logs:
            return verdict
        disagreement = expectations.compare_ranks(logs)
        if not disagreement:
            return verdict
        if verdict.outcome is launch.Outcome.PASSED:
            command = command_of(self, self._result)
            failure = FailureView.of_text(disagreement, rerun_command=command)
            return launch.Verdict(launch.Outcome.FAILED, failure=failure)
        return verdict.with_note(disagreement)


def _skips_without_set_up(test: RankedTestCase) -> bool:
    method = getattr(test, test._testMethodName, None)
    if any(getattr(target, "__unittest_skip__", False) for target in (type(test), method)):
        return True
    try:
        return test._known_skip() is not None
    except AttributeError:
        # A need that reads what setUp has yet to set: it may skip.
        return True
    except Exception:
        return False


# --------------------------------------------------------------------------------------------------------------------
# A rank that is a process, with the interface of multiprocessing: its handle in the parent, and their pipe.

# In seconds; PyTorch waits as long.
STACKS_TIMEOUT = 5.0


class RankProcess:
    """The parent's handle of one rank, with the interface of multiprocessing.Process."""

    def __init__(self, run: launch.Run, rank: int):
        self._run = run
        self.rank = rank
        self.name = f"process {rank}"

    @property
    def pid(self) -> int:
        return self._run.pids[self.rank]

    @property
    def exitcode(self) -> int | None:
        self.join(timeout=0)
        ended = self._run.exits.get(self.rank)
        return ended.code if ended else None

    def is_alive(self) -> bool:
        return self.exitcode is None and not self._run.lost

    def join(self, timeout: float | None = None) -> None:
        until = None if timeout is None else launch.now() + timeout
        while self.rank in self._run.alive and self._run.wait_for_event(until):
            pass

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self._run.signal(number, self.rank)


class UnstartedRank:
    """Stands for a rank that would have skipped, with the interface of multiprocessing.Process."""

    pid = None

    def __init__(self, rank: int, exitcode: int):
        self.rank = rank
        self.name = f"process {rank}"
        self.exitcode = exitcode

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class RankEvent(enum.Enum):
    """A request of PyTorch's parent to a rank: `MultiProcessTestCase.Event`."""

    GET_TRACEBACK = 1


class PipeFromRank:
    """The parent's end of the pipe that PyTorch has to each rank: it gives the text of the rank's exception.

    Of a running rank that was sent `RankEvent.GET_TRACEBACK`, it gives the stacks.
    """

    def __init__(self, run: launch.Run, rank: int):
        self._run = run
        self._rank = RankProcess(run, rank)
        self._received = False
        self._stacks: list[str] = []
        self.closed = False

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Wait until the rank has ended, unless it was asked for its stacks; is there a text?"""
        if self._stacks:
            return True
        self._rank.join(timeout)
        return self._rank.rank not in self._run.alive and not self._received and self._text() is not None

    def recv(self) -> str:
        if not self.poll(None):
            raise EOFError
        if self._stacks:
            return self._stacks.pop(0)
        self._received = True
        return self._text() or ""

    def _text(self) -> str | None:
        account = launch.read_account(self._run.job.account(self._rank.rank))
        return account.traceback or None if account else None

    def send(self, value: Any) -> None:
        rank = self._rank.rank
        if value is RankEvent.GET_TRACEBACK and rank in self._run.alive:
            self._run.dump(STACKS_TIMEOUT, [rank])
            file = self._run.job.stacks(rank)
            with suppress(OSError):
                if text := file.read_text(encoding="utf-8", errors="replace"):
                    self._stacks.append(text)
                # The failure has stacks of its own.
                os.truncate(file, 0)

    def close(self) -> None:
        self.closed = True


class PipeToParent:
    """The rank's end of that pipe; in all other respects it is the rank's AccountWriter."""

    def __init__(self, account: launch.AccountWriter):
        self.account_writer = account
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        # A copy has no attributes yet.
        if name == "account_writer":
            raise AttributeError(name)
        return getattr(self.account_writer, name)

    def send(self, value: Any) -> None:
        """Keep the text of an exception, which an overriding `run_test` sends before it exits."""
        if isinstance(value, str):
            self.account_writer.sent_text = value

    def poll(self, timeout: float | None = 0.0) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


class ConnectionAccount(launch.AccountWriter):
    """The account of a rank that a test has started itself, as a process of multiprocessing."""

    def __init__(self, connection: Any):
        super().__init__(None)
        self._connection = connection

    def failed(self, error: BaseException, assertion: bool, within: str = "", traceback: str | None = None) -> None:
        if self.account is None:
            with suppress(AttributeError, OSError):
                self._connection.send(within + launch.format_error(error))
        super().failed(error, assertion, within, traceback)


def account_behind(pipe: Any) -> launch.AccountWriter:
    """Return the account to write in a rank whose `run_test` was given this pipe, or one of the test's own making."""
    if isinstance(pipe, launch.AccountWriter):
        return pipe
    context = launch.current_context()
    return ConnectionAccount(pipe) if context is None else context.account


# --------------------------------------------------------------------------------------------------------------------
# MultiProcessTestCase: a test method that runs once in each of `world_size` fresh processes.
#
# In the parent, another method replaces it, which waits for the ranks and raises their common verdict. In a rank,
# only the method itself runs, and the cleanups that it registers.

# Keeps these frames out of tracebacks: the message is complete.
# Does the same in pytest.
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
        world_size = self._checked_world_size()
        self._start_ranks(world_size, self._directory, first_plan(faults_of_test(self)), self.addCleanup)

    def _start_ranks(
        self, world_size: int, directory: Path, plan: FaultPlan | None, add_cleanup: Callable[..., Any]
    ) -> None:
        """Start the ranks of the test, which runs in them by `_run`."""
        job = self._job(
            _run_rank,
            world_size,
            directory,
            add_cleanup,
            arguments={
                "test_name": self._current_test_name(),
                "file_name": self.file_name,
                "options": self._options_of_run(),
            },
            skips={code: skip.message for code, skip in SKIP_BY_CODE.items()},
            sanitize=self._sanitize().with_faults(plan),
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
            refuse_faults(self, f"{type(self).__qualname__} starts its ranks itself: remove its _start_processes")
            self._verdict = verdict_on_foreign_ranks(
                self.processes,
                self.pid_to_pipe,
                self._timeout(),
                self._expected(fn),
                self._case(),
                self._get_timedout_process_traceback,
            )
        elif isinstance(sweep := faults_of_test(self), Sweep):
            self._verdict = launch.sweep_verdict(sweep, functools.partial(self._run_with, fn, sweep.recording))
        else:
            _, verdict = self._wait_for_verdict(fn)
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

    def _run_with(
        self, fn: Callable[[], Any], first: FaultPlan, plan: FaultPlan
    ) -> tuple[Sequence[RankReport], launch.Verdict]:
        """Run the test with these faults of a sweep. The ranks of the first run are there."""
        if plan == first:
            return self._wait_for_verdict(fn)
        with ExitStack() as resources:
            directory = launch.new_directory(self.id())
            resources.callback(launch.discard, directory, of_fault=True)
            self.file_name = str(directory / "store")
            self._start_ranks(self._checked_world_size(), directory, plan, resources.callback)
            return self._wait_for_verdict(fn)

    def _wait_for_verdict(self, fn: Callable[[], Any]) -> tuple[Sequence[RankReport], launch.Verdict]:
        """Wait for the ranks that this test has started, and judge them."""
        if self._launched is None:
            setup = f"{type(self).__qualname__}.setUp()"
            raise self._error(f"no ranks were started: {setup} must call self._spawn_processes()")
        expected = self._expected(fn)
        with self._interruptible():
            outcome = launch.watch(self._launched, self._timeout(), expected, self._get_timedout_process_traceback)
        verdict = outcome.verdict(self._case())
        rank_warnings.warn_again_of_ranks(outcome.reports, filtered=verdict.outcome is launch.Outcome.PASSED)
        if invocation.verdict_note is not None:
            note = invocation.verdict_note(outcome.reports, expected, verdict)
            if note:
                verdict = verdict.with_note(note)
        if verdict.outcome is launch.Outcome.PASSED:
            print_leftovers(self._short_name(), outcome.reports)
        return outcome.reports, verdict

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
            launch.end_run(self._launched)
        elif self._launched is None:
            end_foreign_ranks(getattr(self, "processes", ()))
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
        with rank_warnings.recorded_warnings(context.account):
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
