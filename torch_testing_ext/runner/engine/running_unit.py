"""One unit while it runs, as the runner sees it."""

from __future__ import annotations

import enum
import functools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch_testing_ext._machine.machine_memory import memory_of
from torch_testing_ext._process import shell_words, system
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.event_loop import EventLoop, Timer
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.setting_names import LOGS
from torch_testing_ext._process.terminal import NAME_OF_TEST, TERMINAL_VARIABLE
from torch_testing_ext.runner import aspects_of_run
from torch_testing_ext.runner.model import Attempt, Lease, Test, Unit
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.processes import fork_parent_messages, supervisor_messages, unit_spec, worker_messages
from torch_testing_ext.runner.processes.file_handle import FileHandle
from torch_testing_ext.runner.processes.file_processes import FileProcesses

from .unit_files import UnitFiles
from .unit_log import AttemptResult, EndCause, UnitLog, WorkerExit

# The launch layer explains a hang of ranks best, so it times out first: its dumps, the answer of NCCL and the verdict
# take a while.
BACKSTOP = 15.0
# The first test may begin only when its file has been imported, here or in its own process: no time of the test.
UNIT_START_TIMEOUT = 180.0
# A supervisor that takes longer to end its unit is stuck.
SUPERVISOR_TIMEOUT = 10.0


class UnitHandle(Protocol):
    """A unit that runs, on this machine or on a node of a cluster."""

    @property
    def cause(self) -> EndCause: ...
    @property
    def unit(self) -> Unit: ...
    @property
    def lease(self) -> Lease: ...
    @property
    def test(self) -> Test: ...
    @property
    def seconds(self) -> float: ...
    def end(self, cause: EndCause) -> None: ...
    def kill(self) -> None: ...
    def ask_for_stacks(self, answer: Callable[[str], object]) -> None: ...
    def new_output(self) -> str: ...


class UnitListener:
    """Receives the events of running units. Attempts begin at times of this machine's time.monotonic()."""

    def test_began(self, running: UnitHandle, test: Test) -> None: ...
    def test_is_slow(self, running: UnitHandle, test: Test, seconds: float) -> None: ...
    def results(self, running: UnitHandle, attempts: list[Attempt]) -> None: ...
    def unit_ended(self, running: UnitHandle, attempts: list[Attempt], rest: list[int]) -> None: ...
    def unit_lost(self, running: UnitHandle, rest: list[int], why: str) -> None:
        """It was lost with its node."""


class _Processes(enum.Enum):
    """The processes of a unit, as far as this process knows."""

    WATCHED = "their supervisor answers"
    UNWATCHED = "their supervisor has ended, and they may still run"
    GONE = "none is left"

    @property
    def are_left(self) -> bool:
        return self is not _Processes.GONE


@dataclass(frozen=True)
class _Ending:
    """The reason for which a unit has been asked to end."""

    cause: EndCause = EndCause.ITSELF
    # The reason in words, if it is the memory of the node.
    why: str = ""
    # Other units have some of that memory, too.
    evicted: bool = False


class Deadlines:
    """The times at which the test of a unit is slow, and at which the unit is ended; none under a debugger."""

    def __init__(
        self,
        loop: EventLoop,
        options: Options,
        ask_for_stacks: Callable[[Callable[[str], object]], None],
        end: Callable[[], object],
    ):
        """`end` is called at the deadline, when the stacks have been taken."""
        self._loop = loop
        self._options = options
        self._ask_for_stacks = ask_for_stacks
        self._end = end
        self._timers: list[Timer] = []
        self._is_closed = options.takes_terminal

    def time_limit(self, test: Test) -> float:
        return test.timeout or self._options.timeout

    def time_to_end(self, test: Test) -> float:
        """The time after which the unit is ended, if its launch layer has not ended the test before."""
        limit = self.time_limit(test)
        if not test.has_ranks:
            return limit
        longest = aspects_of_run.longest(self._options)
        return limit + BACKSTOP if longest is None else longest

    def begin(self, seconds: float, when_slow: Callable[[], object] | None = None) -> None:
        """Set the deadline of a test or fixture, and forget that of the one before."""
        if self._is_closed:
            return
        self._cancel()
        self._timers.append(self._loop.after(seconds, self._on_timeout))
        if when_slow is not None:
            self._timers.append(self._loop.after(self._options.slow_after, when_slow))

    def close(self) -> None:
        """The unit ends: nothing has a deadline any more."""
        self._is_closed = True
        self._cancel()

    def _cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def _on_timeout(self) -> None:
        # Others follow these if the test ends while its stacks are taken.
        timers = self._timers

        def end(*_: str) -> None:
            if self._timers is timers:
                self._end()

        self._ask_for_stacks(end)
        timers.append(self._loop.after(SUPERVISOR_TIMEOUT, end))


class RunningUnit:
    """A unit with its processes, from its start to the end of its last process."""

    def __init__(
        self,
        unit: Unit,
        lease: Lease,
        files: FileProcesses,
        options: Options,
        environ: Mapping[str, str],
        listener: UnitListener,
        command: str,
        show_command: str = "",
        locks: tuple[int, ...] = (),
    ):
        """Starts the unit. Raises OSError, and leaves nothing behind, if the system refuses what it needs.

        `command` and `show_command` are about one test, whose name follows. `locks`: of its devices.
        """
        self.unit = unit
        self.lease = lease
        self.listener = listener
        self.began = time.monotonic()
        self._files = files
        self._file: FileHandle = files.file(unit.file)
        end = functools.partial(self.end, EndCause.DEADLINE)
        self._deadlines = Deadlines(files.loop, options, self._ask_at_deadline, end)
        self._ending = _Ending()
        self._processes = _Processes.WATCHED
        # The pid is not known yet.
        self._supervisor_pid = 0
        self._backstop: Timer | None = None
        self._stacks_wanted: list[Callable[[str], object]] = []
        spec = self._make_spec(environ, command, show_command)
        self._written = UnitFiles(spec)
        self._log = UnitLog(unit, spec.tests, spec.commands, self.began)
        self._start_processes(locks)
        self._begin_deadline(0, UNIT_START_TIMEOUT)

    def _start_processes(self, locks: tuple[int, ...]) -> None:
        with ExitStack() as on_failure:
            on_failure.callback(self._written.remove)
            ours, theirs = socket_pair()
            on_failure.enter_context(ours)
            on_failure.enter_context(theirs)
            self._supervisor = self._file.start(self._written.spec, theirs, self._gone, locks)
            on_failure.pop_all()
        self._worker: Channel[worker_messages.FromWorker] = Channel(ours, worker_messages.FromWorker)
        self._files.loop.serve(self._supervisor.channel, self._supervisor_said, self._supervisor_ended)
        self._files.loop.serve(self._worker, self._worker_said, lambda: None)

    def _make_spec(
        self,
        environ: Mapping[str, str],
        command: str,
        show_command: str,
    ) -> unit_spec.UnitSpec:
        """Describe the unit for its worker, and make its folder."""
        directory = self._files.directory / f"unit{self.unit.number}"
        # A test may have emptied the folder for temporary files.
        directory.mkdir(parents=True, exist_ok=True)
        kept = os.environ.get(LOGS)
        ranks = Path(kept, self._files.directory.name, directory.name) if kept else directory / "ranks"
        tests = self.unit.tests
        names = [shell_words.test_as_argument(str(test.id)) for test in tests]
        variables = {**environ, LOGS: str(ranks)}
        if TERMINAL_VARIABLE in environ:
            variables[TERMINAL_VARIABLE] = environ[TERMINAL_VARIABLE].replace(NAME_OF_TEST, names[0])
        return unit_spec.UnitSpec(
            self.unit.number,
            str(self._file.path),
            self._file.load_as,
            str(self._files.root),
            tuple(test.id.dotted for test in tests),
            tuple(self._deadlines.time_limit(test) for test in tests),
            tuple(f"{command} {name}" for name in names),
            tuple(f"{show_command} {name}" for name in names),
            directory,
            ranks,
            variables,
        )

    # -- requests

    @property
    def cause(self) -> EndCause:
        """Why it ends; ITSELF as long as nothing has asked it to."""
        return self._ending.cause

    def end(self, cause: EndCause) -> None:
        """Escalate: SIGTERM, then SIGKILL."""
        if self.cause is EndCause.ITSELF:
            self._ask_to_end(_Ending(cause), supervisor_messages.AboutWorker.END)

    def kill(self) -> None:
        self._ask_to_end(_Ending(EndCause.INTERRUPTED), supervisor_messages.AboutWorker.KILL)

    def end_for_memory(self, why: str, for_others: bool) -> None:
        """End it at once, since the node's memory is nearly used up. `for_others`: they have some of it, too."""
        if self.cause is EndCause.ITSELF:
            ending = _Ending(EndCause.MEMORY, why, for_others)
            self._ask_to_end(ending, supervisor_messages.AboutWorker.KILL)

    def _ask_to_end(self, ending: _Ending, request: supervisor_messages.AboutWorker) -> None:
        self._ending = ending
        self._deadlines.close()
        if not self._processes.are_left:
            # The supervisor may watch another unit.
            return
        self._supervisor.channel.send(request)
        if self._backstop is None:
            self._backstop = self._files.loop.after(SUPERVISOR_TIMEOUT, lambda: self._file.kill(self._supervisor))

    def memory(self) -> int:
        """The bytes that all of its processes have now; none before they have started."""
        if not self._supervisor_pid or not self._processes.are_left:
            return 0
        return memory_of(system.descendants(self._supervisor_pid))

    def ask_for_stacks(self, answer: Callable[[str], object]) -> None:
        """Ask for the stacks of all of its processes, as far as they have not been read."""
        self._stacks_wanted.append(answer)
        if self._processes is _Processes.WATCHED:
            self._supervisor.channel.send(supervisor_messages.AboutWorker.TAKE_STACKS)
        else:
            self._stacks_taken()

    def _ask_at_deadline(self, answer: Callable[[str], object]) -> None:
        """Ask for the stacks of the running test, which has had its time even if the request interrupts its wait."""
        test = self._log.running

        def note(stacks: str) -> None:
            if test is not None:
                self._log.overdue[test] = stacks
            answer(stacks)

        if test is not None:
            self._log.overdue[test] = ""
        self.ask_for_stacks(note)

    def _stacks_taken(self) -> None:
        """Answer everything that has asked for stacks: there will be no more of them."""
        if not self._stacks_wanted:
            return
        answers = self._stacks_wanted
        self._stacks_wanted = []
        stacks = self._written.new_stacks()
        for answer in answers:
            answer(stacks)

    def new_output(self) -> str:
        """The output since the last call."""
        return self._written.new_output()

    @property
    def test(self) -> Test:
        """The test that is running, or is about to run."""
        number = self._log.running
        if number is None:
            number = len(self._log.ended) % len(self.unit.tests)
        return self.unit.tests[number]

    @property
    def seconds(self) -> float:
        """The time that the current test has been running."""
        test = self._log.running
        began = self.began if test is None else self._log.began[test].at
        return time.monotonic() - began

    # -- reports of its processes

    def _worker_said(self, message: worker_messages.FromWorker) -> None:
        self._log.add(message)
        match message:
            case worker_messages.Began(number):
                self.listener.results(self, self._attempts(self._log.certain()))
                self.listener.test_began(self, self.unit.tests[number])
                self._begin_deadline(number)
            case worker_messages.FixtureBegan():
                # A class or module fixture may take as long as the longest test of the unit.
                longest = max(self._deadlines.time_to_end(test) for test in self.unit.tests)
                self._deadlines.begin(longest)
            case worker_messages.FixtureEnded() if self._log.running is not None:
                # The test that set it up has its own time now.
                self._begin_deadline(self._log.running)
            case fork_parent_messages.PreloadModules(modules):
                self._file.add_preload_hints(modules)

    def _begin_deadline(self, number: int, least: float = 0.0) -> None:
        """Set the deadline of a test, not below `least`. That of the last test holds until the unit ends."""
        test = self.unit.tests[number]

        def when_slow() -> None:
            self.listener.test_is_slow(self, test, self.seconds)

        seconds = max(least, self._deadlines.time_to_end(test))
        self._deadlines.begin(seconds, when_slow)

    def _supervisor_said(self, message: supervisor_messages.FromSupervisor) -> None:
        """Handle what the supervisor reports; the end of the worker ends the unit."""
        match message:
            case supervisor_messages.StacksTaken():
                self._stacks_taken()
            case supervisor_messages.SupervisorWatches(pid):
                self._supervisor_pid = pid
            case supervisor_messages.WorkerEnded(status):
                self._processes = _Processes.GONE
                self._conclude(
                    WorkerExit(
                        self.cause,
                        message.at,
                        os.waitstatus_to_exitcode(status),
                        message.leftovers,
                        self._written.stacks(),
                        self._ending.why,
                        self._ending.evicted,
                    )
                )
            case _:
                unexpected(message)

    def _supervisor_ended(self) -> None:
        if self._processes is _Processes.WATCHED:
            self._processes = _Processes.UNWATCHED
        self._stacks_taken()

    def _gone(self, how: str) -> None:
        """The supervisor has ended, and nothing that the unit started is left."""
        if not self._processes.are_left:
            return
        for message in self._supervisor.channel.receive_available():
            self._supervisor_said(message)
        if not self._processes.are_left:
            return
        # It has ended without a report.
        self._processes = _Processes.GONE
        cause = EndCause.NOT_STARTED
        broken = self._file.contents.broken
        if self._files.failure is not None:
            why = self._files.failure
        elif broken is not None:
            why = f"its file could not be imported again: {broken.said}"
        else:
            cause = EndCause.LOST
            why = f"the process that watched it {how}"
        if self.cause is EndCause.INTERRUPTED:
            cause = self.cause
        self._conclude(WorkerExit(cause, time.monotonic(), lost=why, stacks=self._written.stacks()))

    def _conclude(self, end: WorkerExit) -> None:
        """Hand out all results. Its worker has ended, and so has everything that it started."""
        self._stacks_taken()
        for message in [*self._worker.receive_available(), *self._written.message_left()]:
            self._worker_said(message)
        self._close()
        results, rest = self._log.finish(end)
        self._files.note_reads(self.unit, self._written.spec.reads)
        self.listener.unit_ended(self, self._attempts(results), rest)
        self._written.remove()

    def _close(self) -> None:
        self._deadlines.close()
        if self._backstop is not None:
            self._backstop.cancel()
        self._files.loop.forget(self._supervisor.channel)
        self._file.release(self._supervisor)
        self._files.loop.forget(self._worker)
        self._worker.close()

    # -- results

    def _attempts(self, results: list[AttemptResult]) -> list[Attempt]:
        """The attempts with everything that reports need."""
        attempts = []
        for result in results:
            output = self._written.output(*result.log)
            ranks = self._written.rank_logs(result.ranks)
            attempts.append(replace(result.attempt, output=output, ranks=ranks, lease=self.lease))
        return attempts
