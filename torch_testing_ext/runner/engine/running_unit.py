"""One unit while it runs, as run_test.py sees it: the reports of its processes, its deadlines, its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch_testing_ext._process import shell
from torch_testing_ext._process.loop import Timer
from torch_testing_ext.launch.settings import PREFIX

from ..model import Attempt, Lease, Test, Unit
from ..processes.file_handle import FileHandle
from ..processes.file_processes import FileProcesses
from ..processes.worker_messages import Began, FixtureBegan, FromWorker, PreloadHints, UnitSpec, WorkerEnded
from .unit_log import AttemptResult, EndCause, UnitLog, WorkerExit
from .unit_processes import NANNY_TIMEOUT, UnitProcesses

# The launch layer explains a hang of ranks best, so it times out first: its dumps, escalation and verdict take a while.
BACKSTOP = 10.0
# The first test may begin only when its file has been imported, here or in its own process: no time of the test.
START_TIMEOUT = 180.0
LOGS = PREFIX + "LOGS"
STREAM = PREFIX + "STREAM"


@dataclass(frozen=True)
class Limits:
    """The time limits of tests."""

    timeout: float
    slow: float

    def of(self, test: Test) -> float:
        return test.timeout or self.timeout

    def deadline(self, test: Test) -> float:
        """The time after which the unit is ended, if its launch layer has not ended the test before."""
        return self.of(test) + (BACKSTOP if test.world_size > 1 else 0.0)


class UnitHandle(Protocol):
    """A unit that runs, on this machine or on a node of a cluster."""

    cause: EndCause

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
    def abandon(self) -> list[Attempt]: ...


class UnitListener:
    """Receives the events of running units. Attempts begin at times of this machine's time.monotonic()."""

    def test_began(self, running: UnitHandle, test: Test) -> None: ...
    def test_is_slow(self, running: UnitHandle, test: Test, seconds: float) -> None: ...
    def results(self, running: UnitHandle, attempts: list[Attempt]) -> None: ...
    def unit_ended(self, running: UnitHandle, attempts: list[Attempt], rest: list[int]) -> None: ...


class RunningUnit:
    """A unit with its processes, from its start to the end of its last process."""

    def __init__(
        self,
        unit: Unit,
        lease: Lease,
        files: FileProcesses,
        limits: Limits,
        environ: Mapping[str, str],
        listener: UnitListener,
        command: str,
        stream: bool = False,
        locks: tuple[int, ...] = (),
    ):
        """Starts the unit. Raises OSError, and leaves nothing behind, if the system refuses what it needs."""
        self.unit = unit
        self.lease = lease
        self.began = time.monotonic()
        self.cause = EndCause.ITSELF
        self._files = files
        self._limits = limits
        self._listener = listener
        self._file: FileHandle = files.file(unit.file)
        spec = self._make_spec(environ, command, stream)
        self._processes = UnitProcesses(self._file, spec, files.loop, self, locks)
        self._log = UnitLog(unit, spec.tests, spec.commands, self.began)
        self._timers: list[Timer] = []
        self._ended_for = ""  # why it was ended for the memory of the node
        self._evicted = False
        self._arm(0, START_TIMEOUT)

    def _make_spec(self, environ: Mapping[str, str], command: str, stream: bool) -> UnitSpec:
        """`command`: the beginning of a command that runs one test; the test's name follows."""
        directory = self._files.directory / f"unit{self.unit.number}"
        kept = os.environ.get(LOGS)
        ranks = Path(kept) / directory.name if kept else directory / "ranks"
        directory.mkdir(exist_ok=True)
        return UnitSpec(
            self.unit.number,
            str(self._file.path),
            self._file.load_as,
            str(self._files.root),
            tuple(test.id.dotted for test in self.unit.tests),
            tuple(self._limits.of(test) for test in self.unit.tests),
            tuple(f"{command} {shell.name(str(test.id))}" for test in self.unit.tests),
            str(directory),
            str(ranks),
            {**environ, LOGS: str(ranks), **({STREAM: "1"} if stream else {})},
        )

    # -- requests

    def end(self, cause: EndCause) -> None:
        """Escalate: SIGTERM, then SIGKILL."""
        if self.cause is EndCause.ITSELF:
            self.cause = cause
            self._disarm()
            self._processes.end()

    def kill(self) -> None:
        self.cause = EndCause.INTERRUPTED
        self._processes.kill()

    def end_for_memory(self, why: str, for_others: bool) -> None:
        """End it at once, since the node's memory is nearly used up. `for_others`: they have some of it, too."""
        if self.cause is EndCause.ITSELF:
            self.cause, self._ended_for, self._evicted = EndCause.MEMORY, why, for_others
            self._disarm()
            self._processes.kill()

    def measure_memory(self, answer: Callable[[int], object]) -> None:
        self._processes.measure_memory(answer)

    def ask_for_stacks(self, answer: Callable[[str], object]) -> None:
        self._processes.ask_for_stacks(answer)

    def new_output(self) -> str:
        """The output since the last call."""
        return self._processes.files.new_output()

    @property
    def test(self) -> Test:
        """The test that is running, or is about to run."""
        test = self._log.running
        return self.unit.tests[len(self._log.ended) % len(self.unit.tests) if test is None else test]

    @property
    def seconds(self) -> float:
        """The time that the current test has been running."""
        test = self._log.running
        began = self.began if test is None else self._log.began[test].at
        return time.monotonic() - began

    # -- reports of its processes

    def worker_said(self, message: FromWorker) -> None:
        self._log.add(message)
        match message:
            case Began(test):
                self._listener.results(self, self._attempts(self._log.certain()))
                self._listener.test_began(self, self.unit.tests[test])
                self._arm(test)
            case FixtureBegan():
                # A class or module fixture may take as long as the longest test of the unit.
                self._set_deadline(max(map(self._limits.deadline, self.unit.tests)))
            case PreloadHints(modules):
                self._file.add_preload_hints(modules)

    def processes_lost(self, how: str) -> None:
        """The nanny has ended, and nothing that the unit started is left."""
        cause, lost = EndCause.LOST, f"the process that watched it {how}"
        if self._files.failure is not None:
            cause, lost = EndCause.NOT_STARTED, self._files.failure
        elif (broken := self._file.contents.broken) is not None:
            cause, lost = EndCause.NOT_STARTED, f"its file could not be imported again: {broken.message}"
        if self.cause is EndCause.INTERRUPTED:
            cause = self.cause
        self._conclude(WorkerExit(cause, time.monotonic(), lost=lost, stacks=self._processes.files.stacks()))

    def abandon(self) -> list[Attempt]:
        """The results so far that were not handed out, when the engine no longer runs."""
        results, _ = self._log.finish(WorkerExit(EndCause.INTERRUPTED, time.monotonic()))
        return self._attempts(results)

    def processes_ended(self, end: WorkerEnded) -> None:
        code = os.waitstatus_to_exitcode(end.status)
        stacks = self._processes.files.stacks()
        self._conclude(WorkerExit(self.cause, end.at, code, end.leftovers, stacks, self._ended_for, self._evicted))

    def _conclude(self, end: WorkerExit) -> None:
        self._disarm()
        self._processes.stacks_taken()
        for message in self._processes.last_messages():
            self._log.add(message)
            match message:
                case Began(test):
                    self._listener.test_began(self, self.unit.tests[test])
                case PreloadHints(modules):
                    self._file.add_preload_hints(modules)
        self._processes.close()
        results, rest = self._log.finish(end)
        self._listener.unit_ended(self, self._attempts(results), rest)
        self._processes.files.remove()

    # -- deadlines

    def _arm(self, number: int, least: float = 0.0) -> None:
        """Set the deadlines of a test, replacing those before. Those of the last test hold until the unit ends.

        `least`: the shortest time that counts as too long.
        """
        test = self.unit.tests[number]
        self._set_deadline(max(least, self._limits.deadline(test)))
        if self.cause is EndCause.ITSELF:
            slow = lambda: self._listener.test_is_slow(self, test, self.seconds)  # noqa: E731
            self._timers.append(self._files.loop.after(self._limits.slow, slow))

    def _set_deadline(self, seconds: float) -> None:
        if self.cause is EndCause.ITSELF:
            self._disarm()
            self._timers = [self._files.loop.after(seconds, self._on_timeout)]

    def _disarm(self) -> None:
        """Cancel the deadlines."""
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def _on_timeout(self) -> None:
        self.ask_for_stacks(lambda stacks: self.end(EndCause.DEADLINE))
        self._timers.append(self._files.loop.after(NANNY_TIMEOUT, lambda: self.end(EndCause.DEADLINE)))

    # -- results

    def _attempts(self, results: list[AttemptResult]) -> list[Attempt]:
        return [self._attempt(result) for result in results]

    def _attempt(self, result: AttemptResult) -> Attempt:
        """A result with everything that reports need."""
        files = self._processes.files
        return Attempt(
            test=self.unit.tests[result.test],
            outcome=result.outcome,
            message=result.message,
            seconds=max(0.0, result.ended - result.began),
            began=result.began,
            repetition=self.unit.repetition,
            number=self.unit.attempt,
            want=result.want,
            output=files.output(*result.log),
            ranks=files.rank_logs(result.ranks),
            leftovers=result.leftovers,
            lease=self.lease,
            memory=result.memory,
            warnings=result.warnings,
            evicted=result.evicted,
            port_in_use=result.port_in_use,
        )
