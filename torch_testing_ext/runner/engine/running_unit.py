"""One unit while it runs, as run_test.py sees it: its orders, what it tells, its deadlines."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process.channel import Channel, Message
from torch_testing_ext._process.loop import Timer
from torch_testing_ext.launch import hang
from torch_testing_ext.launch.report import signal_name
from torch_testing_ext.launch.settings import PREFIX

from ..model import Attempt, Lease, Test, Unit
from ..processes.unit_spec import UnitSpec
from ..processes.zygote import FileHandle, Zygote
from .logs import rank_logs, read_ends
from .unit_log import AttemptResult, EndCause, UnitLog, WorkerExit

# The launch layer explains a hang of ranks best, so it comes first: dumps, ladder and verdict need a moment.
BACKSTOP = 10.0
# A nanny that has not ended its unit by then is stuck.
NANNY_PATIENCE = 10.0
LOGS = PREFIX + "LOGS"
STREAM = PREFIX + "STREAM"
# Whose stacks a file has; else it is named for its rank.
_WHOSE = {"stacks": "the test's process"}


@dataclass(frozen=True)
class Limits:
    """How long tests may take."""

    timeout: float
    slow: float

    def of(self, test: Test) -> float:
        return test.timeout or self.timeout


class UnitListener:
    """Whom a running unit tells what happens to it."""

    def test_began(self, running: RunningUnit, test: Test) -> None: ...
    def test_is_slow(self, running: RunningUnit, test: Test, seconds: float) -> None: ...
    def results(self, running: RunningUnit, results: list[AttemptResult]) -> None: ...
    def unit_ended(self, running: RunningUnit, results: list[AttemptResult], rest: list[int]) -> None: ...


class RunningUnit:
    def __init__(
        self,
        unit: Unit,
        lease: Lease,
        zygote: Zygote,
        limits: Limits,
        environ: Mapping[str, str],
        watcher: UnitListener,
        again: str,
        stream: bool = False,
    ):
        self.unit = unit
        self.lease = lease
        self.began = time.monotonic()
        self.cause = EndCause.ITSELF
        self._zygote = zygote
        self._loop = zygote.loop
        self._limits = limits
        self._watcher = watcher
        self._file: FileHandle = zygote.file(unit.file)
        self.order = self._make_order(environ, again, stream)
        self._story = UnitLog(unit, tuple(str(test.id.dotted) for test in unit.tests), self.order.commands)
        self._nanny, nannys = Channel.pair()
        self._worker, workers = Channel.pair()
        self._timers: list[Timer] = []
        self._stacks_wanted: list[Callable[[str], object]] = []
        self._stacks_seen: dict[Path, int] = {}
        self._printed = 0  # what of the log has been shown
        self._deaf = False  # the nanny has hung up
        self._over = False
        self._loop.listen(self._nanny, self._listen_to_nanny)
        self._loop.listen(self._worker, self._listen_to_worker)
        self._file.start(self.order, nannys, workers, self._gone)
        self._arm(0)

    def _make_order(self, environ: Mapping[str, str], again: str, stream: bool) -> UnitSpec:
        """`again`: what to put before a test's name to run it again."""
        directory = self._zygote.directory / f"unit{self.unit.number}"
        kept = os.environ.get(LOGS)
        ranks = Path(kept) / directory.name if kept else directory / "ranks"
        ranks.mkdir(parents=True, exist_ok=True)
        order = UnitSpec(
            self.unit.number,
            str(self._file.path),
            str(self._zygote.root),
            tuple(test.id.dotted for test in self.unit.tests),
            tuple(self._limits.of(test) for test in self.unit.tests),
            tuple(f"{again} {shlex.quote(str(test.id))}" for test in self.unit.tests),
            str(directory),
            str(ranks),
            {**environ, LOGS: str(ranks), **({STREAM: "1"} if stream else {})},
        )
        order.session.mkdir(parents=True)
        return order

    # -- what it is asked

    def end(self, cause: EndCause) -> None:
        """The ladder."""
        if self.cause is EndCause.ITSELF:
            self.cause = cause
            self._nanny.send({"order": "end"})
            self._disarm()
            self._timers = [self._loop.after(NANNY_PATIENCE, lambda: self._file.kill(self.unit.number))]

    def kill(self) -> None:
        self.cause = EndCause.INTERRUPTED
        self._nanny.send({"order": "kill"})

    def ask_for_stacks(self, answer: Callable[[str], object]) -> None:
        self._stacks_wanted.append(answer)
        if self._deaf:
            self._answer_stacks()
        else:
            self._nanny.send({"order": "stacks"})

    @property
    def test(self) -> Test:
        """The one that runs now, or is about to."""
        test = self._story.running
        return self.unit.tests[len(self._story.ended) % len(self.unit.tests) if test is None else test]

    @property
    def seconds(self) -> float:
        """How long the test that runs now has been running."""
        test = self._story.running
        began = self.began if test is None else self._story.began[test]["at"]
        return time.monotonic() - began

    # -- what it tells

    def _listen_to_worker(self) -> None:
        try:
            messages = self._worker.receive()
        except EOFError:
            self._loop.forget(self._worker)
            return
        for message in messages:
            self._story.hear(message)
            if "began" in message:
                self._watcher.results(self, self._story.certain())
                self._watcher.test_began(self, self.unit.tests[message["began"]])
                self._arm(message["began"])
            elif "learnt" in message:
                self._file.teach(message["learnt"])

    def _listen_to_nanny(self) -> None:
        try:
            messages = self._nanny.receive()
        except EOFError:
            self._deaf = True
            self._loop.forget(self._nanny)
            self._answer_stacks()
            return
        for message in messages:
            self._hear_nanny(message)

    def _hear_nanny(self, message: Message) -> None:
        if "stacks" in message:
            self._answer_stacks()
        else:
            self._finish(message["ended"], message["at"], message["leftovers"])

    def _gone(self, status: int) -> None:
        """The nanny is no more, and nothing that the unit started is left."""
        if not self._over:
            for message in self._nanny.receive_available():
                self._hear_nanny(message)
        if self._over:
            return
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by {signal_name(-code)} (out of memory?)" if code < 0 else f"ended with code {code}"
        lost = f"the process that watched it {how}"
        if self._file.broken is not None:
            lost = f"its file could not be imported once more: {self._file.broken.message}"
        cause = self.cause if self.cause is EndCause.INTERRUPTED else EndCause.LOST
        self._conclude(WorkerExit(cause, time.monotonic(), lost=lost, stacks=self._read_stacks()))

    def _finish(self, status: int, at: float, leftovers: list[str]) -> None:
        code = os.waitstatus_to_exitcode(status)
        self._conclude(WorkerExit(self.cause, at, code, tuple(leftovers), self._read_stacks()))

    def _conclude(self, end: WorkerExit) -> None:
        self._over = True
        self._disarm()
        self._answer_stacks()
        for message in self._worker.receive_available():
            self._story.hear(message)
            if "began" in message:
                self._watcher.test_began(self, self.unit.tests[message["began"]])
            elif "learnt" in message:
                self._file.teach(message["learnt"])
        self._hang_up()
        results, rest = self._story.finish(end)
        self._watcher.unit_ended(self, results, rest)
        shutil.rmtree(self.order.directory, ignore_errors=True)

    def _hang_up(self) -> None:
        for channel in (self._nanny, self._worker):
            self._loop.forget(channel)
            channel.close()

    # -- deadlines

    def _arm(self, number: int) -> None:
        """Anew for each test; what is after the last one, still belongs to that."""
        if self.cause is not EndCause.ITSELF:
            return
        self._disarm()
        test, began = self.unit.tests[number], time.monotonic()
        limit = self._limits.of(test) + (BACKSTOP if test.world_size > 1 else 0.0)
        self._timers = [
            self._loop.at(began + limit, self._time_is_up),
            self._loop.at(began + self._limits.slow, lambda: self._watcher.test_is_slow(self, test, self.seconds)),
        ]

    def _disarm(self) -> None:
        """Its deadlines hold no more."""
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def _time_is_up(self) -> None:
        self.ask_for_stacks(lambda stacks: self.end(EndCause.DEADLINE))
        self._timers.append(self._loop.after(NANNY_PATIENCE, lambda: self.end(EndCause.DEADLINE)))

    # -- what it left

    def _answer_stacks(self) -> None:
        wanted, self._stacks_wanted = self._stacks_wanted, []
        if wanted:
            stacks = self._all_stacks()
            for answer in wanted:
                answer(stacks)

    def _all_stacks(self) -> str:
        """Of its process and its ranks, what was written since this was last asked."""
        files = [self.order.stacks, *sorted(self.order.ranks.glob("*/rank*.stacks"))]
        return "\n\n".join(
            f"{_WHOSE.get(file.stem, file.stem)}:\n{new}" for file in files if (new := self._new_stacks(file))
        )

    def _new_stacks(self, file: Path) -> str:
        size = file.stat().st_size if file.exists() else 0
        seen, self._stacks_seen[file] = self._stacks_seen.get(file, 0), size
        return hang.tidy(read_ends(file, seen, size))

    def new_output(self) -> str:
        """What was printed since this was last asked."""
        size = self.order.log.stat().st_size if self.order.log.exists() else 0
        seen, self._printed = self._printed, size
        return read_ends(self.order.log, seen, size)

    def _read_stacks(self) -> str:
        return hang.tidy(read_ends(self.order.stacks))

    def attempt(self, result: AttemptResult, origin: float) -> Attempt:
        """A result with all that is worth keeping of it; times since `origin`."""
        ranks = rank_logs(Path(self.order.ranks, name) for name in result.ranks)
        return Attempt(
            test=self.unit.tests[result.test],
            outcome=result.outcome,
            message=result.message,
            seconds=max(0.0, result.ended - result.began),
            began=result.began - origin,
            repetition=self.unit.repetition,
            number=self.unit.attempt,
            want=result.want,
            output=read_ends(self.order.log, *result.log),
            ranks=ranks,
            leftovers=result.leftovers,
            lease=self.lease,
        )
