"""One unit while it runs, as run_test.py sees it: the reports of its processes, its deadlines, its end."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from torch_testing_ext._machine.memory import memory_of
from torch_testing_ext._process import shell, system
from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.loop import Timer
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.user_terminal import SETTING, TEST
from torch_testing_ext.launch.settings import PREFIX

from ..model import Attempt, Lease, Test, Unit
from ..options.options import Options
from ..processes import worker_messages
from ..processes.file_handle import FileHandle
from ..processes.file_processes import FileProcesses
from .unit_files import UnitFiles
from .unit_log import AttemptResult, EndCause, UnitLog, WorkerExit

# The launch layer explains a hang of ranks best, so it times out first: its dumps, the answer of NCCL and the verdict
# take a while.
BACKSTOP = 15.0
# The first test may begin only when its file has been imported, here or in its own process: no time of the test.
START_TIMEOUT = 180.0
# A nanny that takes longer to end its unit is stuck.
NANNY_TIMEOUT = 10.0
LOGS = PREFIX + "LOGS"
STREAM = PREFIX + "STREAM"


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


class UnitListener:
    """Receives the events of running units. Attempts begin at times of this machine's time.monotonic()."""

    def test_began(self, running: UnitHandle, test: Test) -> None: ...
    def test_is_slow(self, running: UnitHandle, test: Test, seconds: float) -> None: ...
    def results(self, running: UnitHandle, attempts: list[Attempt]) -> None: ...
    def unit_ended(self, running: UnitHandle, attempts: list[Attempt], rest: list[int]) -> None: ...
    def unit_lost(self, running: UnitHandle, rest: list[int], why: str) -> None:
        """It was lost with its node."""


@dataclass(eq=False)
class RunningUnit:
    """A unit with its processes, from its start to the end of its last process."""

    unit: Unit
    lease: Lease
    files: FileProcesses
    options: Options
    environ: Mapping[str, str]
    listener: UnitListener
    command: str  # about one test, whose name follows; likewise:
    show_command: str = ""
    locks: tuple[int, ...] = ()  # of its devices
    began: float = field(default_factory=time.monotonic)
    cause: EndCause = EndCause.ITSELF
    _timers: list[Timer] = field(default_factory=list)
    _ended_for: str = ""  # why it was ended for the memory of the node
    _evicted: bool = False
    _stacks_wanted: list[Callable[[str], object]] = field(default_factory=list)
    _nanny_pid: int = 0  # not known yet
    _nanny_is_gone: bool = False
    _backstop: Timer | None = None
    _over: bool = False  # no process of it is left

    def __post_init__(self) -> None:
        """Starts the unit. Raises OSError, and leaves nothing behind, if the system refuses what it needs."""
        self._file: FileHandle = self.files.file(self.unit.file)
        self._spec = self._make_spec()
        self._written = UnitFiles(self._spec)
        self._log = UnitLog(self.unit, self._spec.tests, self._spec.commands, self.began)
        self._start_processes()
        self._arm(0, START_TIMEOUT)

    def _start_processes(self) -> None:
        with ExitStack() as on_failure:
            on_failure.callback(self._written.remove)
            ours, theirs = map(on_failure.enter_context, socket_pair())
            self._nanny = self._file.start(self._spec, theirs, self._gone, self.locks)
            on_failure.pop_all()
        self._worker: Channel[worker_messages.FromWorker] = Channel(ours, worker_messages.FromWorker)
        self.files.loop.serve(self._nanny.channel, self._nanny_said, self._nanny_ended)
        self.files.loop.serve(self._worker, self._worker_said, lambda: None)

    def _make_spec(self) -> worker_messages.UnitSpec:
        directory = self.files.directory / f"unit{self.unit.number}"
        kept = os.environ.get(LOGS)
        ranks = Path(kept, self.files.directory.name, directory.name) if kept else directory / "ranks"
        directory.mkdir(exist_ok=True)
        names = [shell.name(str(test.id)) for test in self.unit.tests]
        terminal = {SETTING: self.environ[SETTING].replace(TEST, names[0])} if SETTING in self.environ else {}
        return worker_messages.UnitSpec(
            self.unit.number,
            str(self._file.path),
            self._file.load_as,
            str(self.files.root),
            tuple(test.id.dotted for test in self.unit.tests),
            tuple(map(self._time_limit, self.unit.tests)),
            tuple(f"{self.command} {name}" for name in names),
            tuple(f"{self.show_command} {name}" for name in names),
            directory,
            ranks,
            {**self.environ, **terminal, LOGS: str(ranks), **({STREAM: "1"} if self.options.stream else {})},
        )

    # -- requests

    def end(self, cause: EndCause) -> None:
        """Escalate: SIGTERM, then SIGKILL."""
        if self.cause is EndCause.ITSELF:
            self.cause = cause
            self._disarm()
            self._ask_to_end(worker_messages.AboutWorker.END)

    def kill(self) -> None:
        self.cause = EndCause.INTERRUPTED
        self._ask_to_end(worker_messages.AboutWorker.KILL)

    def end_for_memory(self, why: str, for_others: bool) -> None:
        """End it at once, since the node's memory is nearly used up. `for_others`: they have some of it, too."""
        if self.cause is EndCause.ITSELF:
            self.cause, self._ended_for, self._evicted = EndCause.MEMORY, why, for_others
            self._disarm()
            self._ask_to_end(worker_messages.AboutWorker.KILL)

    def _ask_to_end(self, request: worker_messages.AboutWorker) -> None:
        if self._over:
            return  # the nanny may watch another unit
        self._nanny.channel.send(request)
        if self._backstop is None:
            self._backstop = self.files.loop.after(NANNY_TIMEOUT, lambda: self._file.kill(self._nanny))

    def memory(self) -> int:
        """The bytes that all of its processes have now; none before they have started."""
        return memory_of(system.descendants(self._nanny_pid)) if self._nanny_pid and not self._over else 0

    def ask_for_stacks(self, answer: Callable[[str], object]) -> None:
        """Ask for the stacks of all of its processes, as far as they have not been read."""
        self._stacks_wanted.append(answer)
        if self._nanny_is_gone or self._over:
            self._stacks_taken()
        else:
            self._nanny.channel.send(worker_messages.AboutWorker.TAKE_STACKS)

    def _stacks_taken(self) -> None:
        """Answer everything that has asked for stacks: there will be no more of them."""
        wanted, self._stacks_wanted = self._stacks_wanted, []
        stacks = self._written.new_stacks() if wanted else ""
        for answer in wanted:
            answer(stacks)

    def new_output(self) -> str:
        """The output since the last call."""
        return self._written.new_output()

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

    def _worker_said(self, message: worker_messages.FromWorker) -> None:
        self._log.add(message)
        match message:
            case worker_messages.Began(test):
                self.listener.results(self, self._attempts(self._log.certain()))
                self.listener.test_began(self, self.unit.tests[test])
                self._arm(test)
            case worker_messages.FixtureBegan():
                # A class or module fixture may take as long as the longest test of the unit.
                self._set_deadline(max(map(self._time_to_end, self.unit.tests)))
            case worker_messages.PreloadModules(modules):
                self._file.add_preload_hints(modules)

    def _nanny_said(self, message: worker_messages.FromNanny) -> None:
        match message:
            case worker_messages.StacksTaken():
                self._stacks_taken()
            case worker_messages.NannyWatches(pid):
                self._nanny_pid = pid
            case worker_messages.WorkerEnded():
                self._over = True
                self._processes_ended(message)
            case _:
                unexpected(message)

    def _nanny_ended(self) -> None:
        self._nanny_is_gone = True
        self._stacks_taken()

    def _gone(self, how: str) -> None:
        """The nanny has ended, and nothing that the unit started is left."""
        for message in self._nanny.channel.receive_available() if not self._over else ():
            self._nanny_said(message)
        if not self._over:
            self._over = True
            self._processes_lost(how)

    def _processes_lost(self, how: str) -> None:
        """The nanny has ended without a report."""
        cause, lost = EndCause.LOST, f"the process that watched it {how}"
        if self.files.failure is not None:
            cause, lost = EndCause.NOT_STARTED, self.files.failure
        elif (broken := self._file.contents.broken) is not None:
            cause, lost = EndCause.NOT_STARTED, f"its file could not be imported again: {broken.said}"
        if self.cause is EndCause.INTERRUPTED:
            cause = self.cause
        self._conclude(WorkerExit(cause, time.monotonic(), lost=lost, stacks=self._written.stacks()))

    def _processes_ended(self, end: worker_messages.WorkerEnded) -> None:
        code = os.waitstatus_to_exitcode(end.status)
        stacks = self._written.stacks()
        self._conclude(WorkerExit(self.cause, end.at, code, end.leftovers, stacks, self._ended_for, self._evicted))

    def _conclude(self, end: WorkerExit) -> None:
        self._stacks_taken()
        for message in [*self._worker.receive_available(), *self._written.message_left()]:
            self._worker_said(message)
        self._close()
        results, rest = self._log.finish(end)
        self.files.note_reads(self.unit, self._spec.reads)
        self.listener.unit_ended(self, self._attempts(results), rest)
        self._written.remove()

    def _close(self) -> None:
        self._disarm()
        if self._backstop is not None:
            self._backstop.cancel()
        self.files.loop.forget(self._nanny.channel)
        self._file.release(self._nanny)
        self.files.loop.forget(self._worker)
        self._worker.close()

    # -- deadlines

    def _time_limit(self, test: Test) -> float:
        return test.timeout or self.options.timeout

    def _time_to_end(self, test: Test) -> float:
        """The time after which the unit is ended, if its launch layer has not ended the test before."""
        return self._time_limit(test) + (BACKSTOP if test.has_ranks else 0.0)

    def _arm(self, number: int, least: float = 0.0) -> None:
        """Set the deadlines of a test, not below `least`. Those of the last test hold until the unit ends."""
        test = self.unit.tests[number]
        self._set_deadline(max(least, self._time_to_end(test)))
        if self.cause is EndCause.ITSELF and not self.options.pdb:
            slow = lambda: self.listener.test_is_slow(self, test, self.seconds)  # noqa: E731
            self._timers.append(self.files.loop.after(self.options.slow, slow))

    def _set_deadline(self, seconds: float) -> None:
        if self.cause is EndCause.ITSELF and not self.options.pdb:
            self._disarm()
            self._timers = [self.files.loop.after(seconds, self._on_timeout)]

    def _disarm(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def _on_timeout(self) -> None:
        deadline = self._timers  # others follow it if the test ends while its stacks are taken
        end = lambda *_: self.end(EndCause.DEADLINE) if self._timers is deadline else None  # noqa: E731
        self.ask_for_stacks(end)
        deadline.append(self.files.loop.after(NANNY_TIMEOUT, end))

    # -- results

    def _attempts(self, results: list[AttemptResult]) -> list[Attempt]:
        """The attempts with everything that reports need."""
        files = self._written
        return [
            replace(one.attempt, output=files.output(*one.log), ranks=files.rank_logs(one.ranks), lease=self.lease)
            for one in results
        ]
