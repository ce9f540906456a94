"""The engine that runs the units of a plan: starts units, retries tests, ends the run.

It sends events to reporters and prints nothing. The queue decides which unit begins next, the leases which devices it
gets, and a place (place.py) where and how it runs: here, or on the nodes of a cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from torch_testing_ext._process.loop import Timer

from ..events import (
    AttemptEnded,
    Event,
    Output,
    Reporter,
    RunBegan,
    StatusRequested,
    Stopping,
    TestBegan,
    TestFinished,
    TestIsSlow,
    UnitBegan,
    UnitEnded,
    WaitingForDevices,
    Warned,
)
from ..model import Attempt, Category, FinishedTest, Lease, RunHeader, Summary, Test, TestId, TestOutcome, Unit
from ..options.options import Options
from ..processes.zygote import Zygote
from ..scheduling.inventory import Inventory
from ..scheduling.leases import Leases
from ..scheduling.node_leases import NodeLeases
from ..scheduling.plan import Plan
from ..scheduling.policy import Queue
from .again import Undisturbed
from .memory_return import HeldDevice, MemoryReturn, with_held
from .place import LocalPlace, LostUnitListener, Place
from .question import Question
from .remarks import remarks_in, subject_of
from .running_unit import RunningUnit, UnitHandle
from .signals_and_keys import signals_and_keys
from .unit_log import EndCause
from .waiting import WaitForOthers

STREAM_INTERVAL = 0.05
PATIENCE_FOR_STACKS = 3.0
# While other runs have the devices: how often to try again, in seconds. By chance, so that no two runs keep in step.
RETRY_INTERVAL = (0.05, 0.2)
TELL_AFTER = 0.5  # seconds of waiting
PATIENCE_WITH_OTHERS = 2.0  # seconds, after which devices are reserved


class Engine(LostUnitListener):
    """Runs a plan and sends its events to a reporter."""

    def __init__(
        self,
        processes: Zygote | Place,
        options: Options,
        inventory: Inventory,
        leases: Leases | NodeLeases,
        queue: Queue,
        reporter: Reporter,
        header: RunHeader | None = None,
        memory: MemoryReturn | None = None,
    ):
        """`processes`: those of this machine, or another place. `memory`: that of its devices, if it is checked."""
        if isinstance(processes, Zygote):
            assert isinstance(leases, Leases)
            processes = LocalPlace(processes, options, inventory, leases, RunningUnit)
        self._place = processes
        self._options = options
        self._inventory = inventory
        self._leases = leases
        self._queue = queue
        self._reporter = reporter
        self._header = header or RunHeader()
        self._memory = memory or MemoryReturn(processes.loop)
        self._began = time.monotonic()
        self._running: dict[int, UnitHandle] = {}
        self._attempts: dict[tuple[TestId, int], list[Attempt]] = {}
        self._finished: list[FinishedTest] = []
        self._failures = 0
        self._done: set[tuple[TestId, int]] = set()  # tests of `_finished`, with their repetition
        self._unfinished: list[tuple[Test, int]] = []  # with their repetition
        self._lost: dict[tuple[TestId, int, int], str] = {}  # attempts that a node was lost with, and how
        self._undisturbed = Undisturbed(leases, self._warn)
        self._warnings: list[str] = []
        self._remarks: set[str] = set()  # what tests have said of their ranks
        self._held: tuple[HeldDevice, ...] = ()
        self._stopping = False
        self._interrupts = 0
        self._error = ""
        self._question: Question | None = None
        self._copying: Timer | None = None
        self._waiting: WaitForOthers | None = None
        self._left: Counter[str] = Counter()  # units of each file that have not ended
        self._numbers = itertools.count()

    def run(
        self, plan: Plan, broken: Sequence[Attempt] = (), interrupted: Callable[[], str | None] = lambda: None
    ) -> Summary:
        """Run the whole plan; no event reports its end. `broken`: files that could not be imported.

        `interrupted` is asked once, at the start, for the signal that has interrupted the run already. An exception
        ends the run, but not its reports: the summary has it, and all results so far.
        """
        self._began = time.monotonic()
        self._numbers = itertools.count(max((unit.number for unit in plan.units), default=-1) + 1)
        self._left.update(unit.file for unit in plan.units)
        try:
            self._report_start(plan, broken)
            for attempt in (*broken, *map(_skipped, plan.skipped)):
                self._finish_at_once(attempt)
            with signals_and_keys(self._place.loop, self._interrupt, self._ask), self._showing_output():
                if reason := interrupted():
                    self._interrupt(reason)
                self._run_all(plan)
            self._close_files()
        except Exception:
            self._break(traceback.format_exc())
        self._finish_cut_short()
        return self._summary()

    def _report(self, event: Event) -> None:
        self._reporter.on_event(event)

    def _report_start(self, plan: Plan, broken: Sequence[Attempt]) -> None:
        self._report(
            RunBegan(
                tests=(*(attempt.test for attempt in broken), *plan.tests),
                units=plan.units,
                devices=self._inventory.names,
                slots=self._options.jobs,
                clock=time.time(),
                seed=self._options.seed if self._options.shuffle else None,
                fake=self._inventory.fake,
                repetitions=self._options.repeat or 1,
                header=self._header,
                nodes=self._inventory.nodes,
            )
        )

    def _run_all(self, plan: Plan) -> None:
        self._begin_what_fits()
        while self._running or self._memory.is_waiting or self._waiting is not None or self._must_wait():
            self._place.loop.step()
            self._begin_what_fits()
            idle = not self._running and not self._memory.is_waiting
            if idle and not len(self._queue) and self._options.endless and not self._stopping:
                self._repeat(plan)

    def _must_wait(self) -> bool:
        """Nothing runs. Do units wait for nodes that may come? If units wait in vain, all of their tests fail."""
        if not len(self._queue):
            return False
        if self._place.wait_for_more():
            return True
        reason = self._place.shortage
        self._stopping = True
        self._report(Stopping(reason))
        for unit in self._queue.clear():
            self._fail_unit(unit, Lease(), f"it was not run: {reason}")
        return False

    def _repeat(self, plan: Plan) -> None:
        last = max(repetition for _, repetition in self._attempts)
        for unit in plan.units:
            if unit.repetition == 0:
                self._left[unit.file] += 1
                self._queue.add(dataclasses.replace(unit, number=next(self._numbers), repetition=last + 1))
        self._begin_what_fits()

    def _begin_what_fits(self) -> None:
        began = True
        self._drop_hopeless()
        while began:
            waited = self._waiting.seconds if self._waiting is not None else 0.0
            with self._leases.choosing(self._queue.wants_devices, urgent=waited > PATIENCE_WITH_OTHERS):
                began = self._begin_next()
        self._wait_for_others()

    def _begin_next(self) -> bool:
        """Begin the next unit that fits. Returns False if there is none."""
        unit = self._queue.take(self._leases.free_devices, self._leases.free_slots)
        if unit is None:
            return False
        if unit.devices:
            self._waiting = None
        lease = self._leases.take(unit)
        self._memory.leased(lease.devices)
        self._report(UnitBegan(unit, lease, self._now()))
        try:
            self._running[unit.number] = self._place.start(unit, lease, self)
        except OSError as error:
            self._fail_to_start(unit, lease, error)
        return True

    def _wait_for_others(self) -> None:
        """If devices are missing because other runs have them, try again in a moment: a lock cannot be awaited."""
        if not (self._queue.wants_devices and self._leases.elsewhere):
            self._waiting = None
            return
        if self._waiting is None:
            self._waiting = WaitForOthers()
        if self._waiting.retry is None or self._waiting.retry.at <= time.monotonic():
            # What wakes the loop is enough: whatever happens, it tries to begin units then.
            self._waiting.retry = self._place.loop.after(random.uniform(*RETRY_INTERVAL), lambda: None)
        if (owners := self._leases.owners()) != self._waiting.told and self._waiting.seconds > TELL_AFTER:
            self._waiting.told = owners
            self._report(WaitingForDevices(self._leases.elsewhere, owners))

    def _fail_to_start(self, unit: Unit, lease: Lease, error: OSError) -> None:
        """Fail all tests of a unit by name: the system refused what the unit needs, such as space in a folder."""
        self._fail_unit(unit, lease, f"it was not run: {error}")
        self._memory.when_back(lease.devices, lambda held: None)
        self._leases.give_back(lease)
        self._report(UnitEnded(unit, lease, self._now()))
        self._count_down(unit)

    def _fail_unit(self, unit: Unit, lease: Lease, message: str) -> None:
        self._take_all(
            unit,
            [
                Attempt(
                    test,
                    TestOutcome.ERROR,
                    message,
                    began=self._now(),
                    repetition=unit.repetition,
                    number=unit.attempt,
                    lease=lease,
                )
                for test in unit.tests
            ],
        )

    def _now(self) -> float:
        return time.monotonic() - self._began

    # -- events of running units

    def test_began(self, running: UnitHandle, test: Test) -> None:
        self._report(TestBegan(test, running.unit, running.lease, self._now()))

    def test_is_slow(self, running: UnitHandle, test: Test, seconds: float) -> None:
        self._report(TestIsSlow(test, seconds, running.lease))

    def results(self, running: UnitHandle, attempts: Iterable[Attempt]) -> None:
        """Take attempts that have ended; from here on, they begin at a time since the start of the run."""
        since_start = [dataclasses.replace(one, began=one.began - self._began) for one in attempts]
        self._take_all(running.unit, since_start)

    def _take_all(self, unit: Unit, attempts: Iterable[Attempt]) -> None:
        retried = tuple([attempt.test for attempt in attempts if self._take(attempt)])
        if retried:
            self._add(unit, retried, unit.attempt + 1)

    def unit_ended(self, running: UnitHandle, attempts: list[Attempt], rest: list[int]) -> None:
        unit = running.unit
        self._copy_output_of(running)
        del self._running[unit.number]
        conclude = functools.partial(self._conclude, running, attempts, rest)
        self._memory.when_back(running.lease.devices, conclude)

    def _conclude(
        self, running: UnitHandle, attempts: list[Attempt], rest: list[int], held: tuple[HeldDevice, ...]
    ) -> None:
        """A unit has ended, and the memory of its devices is back, unless some of them are held."""
        unit = running.unit
        self.results(running, with_held(attempts, held))
        self._leases.give_back(running.lease)
        self._quarantine(held)
        self._report(UnitEnded(unit, running.lease, self._now()))
        tests = tuple(unit.tests[number] for number in rest)
        if running.cause is EndCause.INTERRUPTED:
            self._unfinished += _tests_of(unit)
        elif tests and self._stopping:
            self._unfinished += [(test, unit.repetition) for test in tests]
        elif tests:
            self._add(unit, tests, unit.attempt)
        self._count_down(unit)

    def _quarantine(self, held: tuple[HeldDevice, ...]) -> None:
        for one in held:
            self._leases.quarantine(one.name)
            self._warn(f"{one}; it is not used again in this run")
        self._held += held

    def _drop_hopeless(self) -> None:
        """Fail units for which too few devices are left."""
        for unit in self._queue.drop(lambda unit: not self._leases.can_ever_fit(unit)) if self._held else ():
            self._fail_unit(
                unit, Lease(), f"it was not run: too few devices are left: {'; '.join(map(str, self._held))}"
            )
            self._count_down(unit)

    def unit_lost(self, running: UnitHandle, rest: list[int], why: str) -> None:
        """A node was lost with a unit: the tests without a result run again, as the same attempt, but only once."""
        unit = running.unit
        del self._running[unit.number]
        self._leases.give_back(running.lease)
        self._report(UnitEnded(unit, running.lease, self._now()))
        tests = [unit.tests[number] for number in rest]
        if self._stopping or running.cause is EndCause.INTERRUPTED:
            self._unfinished += [(test, unit.repetition) for test in tests]
        else:
            again = [test for test in tests if _attempt_of(unit, test) not in self._lost]
            if again:
                self._lost.update((_attempt_of(unit, test), why) for test in again)
                self._add(unit, tuple(again), unit.attempt)
                self._warn(f"{why}: {_names_of(again)} again, as the same attempt")
            self._take_all(unit, [self._crash(running, test, why) for test in tests if test not in again])
        self._count_down(unit)

    def _crash(self, running: UnitHandle, test: Test, why: str) -> Attempt:
        unit, before = running.unit, self._lost[_attempt_of(running.unit, test)]
        message = f"it was lost twice with the node that it ran on: first, {before}; then, {why}"
        return Attempt(
            test,
            TestOutcome.CRASHED,
            message,
            began=self._now(),
            repetition=unit.repetition,
            number=unit.attempt,
            lease=running.lease,
        )

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        self._report(Warned(text))

    def _add(self, unit: Unit, tests: tuple[Test, ...], attempt: int) -> None:
        self._left[unit.file] += 1
        alone = self._undisturbed.must_be_alone(tests, unit.repetition)
        memory = None if self._undisturbed.must_have_whole_devices(tests, unit.repetition) else unit.memory
        self._queue.add(Unit(next(self._numbers), tests, unit.repetition, attempt, unit.seconds, alone, memory))

    def _count_down(self, unit: Unit) -> None:
        """Close the process of a file after its last unit, unless the plan may be repeated."""
        self._left[unit.file] -= 1
        if not self._left[unit.file] and not self._options.until_failure:
            self._place.close_file(unit.file)

    def _close_files(self) -> None:
        for file in self._left:
            self._place.close_file(file)

    # -- attempts

    def _take(self, attempt: Attempt) -> bool:
        """Take an attempt into account. Returns whether the test is to be retried."""
        failed = self._options.policy.verdict(attempt.outcome) is Category.FAILED
        retry = failed and attempt.number <= self._options.retries and not self._stopping
        if failed and not self._stopping and self._undisturbed.wants_again(attempt):
            retry = True
        attempts = self._attempts.setdefault((attempt.test.id, attempt.repetition), [])
        attempts.append(attempt)
        self._report(AttemptEnded(attempt, retry))
        if not retry:
            self._finish(FinishedTest(tuple(attempts)))
        return retry

    def _finish_at_once(self, attempt: Attempt) -> None:
        self._report(AttemptEnded(attempt, retry=False))
        self._finish(FinishedTest((attempt,)))

    def _finish(self, finished: FinishedTest) -> None:
        self._finished.append(finished)
        self._done.add((finished.test.id, finished.last.repetition))
        self._report(TestFinished(finished))
        failed = self._options.policy.verdict_on(finished) is Category.FAILED
        self._failures += failed
        for remark in () if failed else remarks_in(finished.last.output):
            if subject_of(remark) not in self._remarks:  # what is said once, every worker says
                self._remarks.add(subject_of(remark))
                self._warn(remark)
        most = 1 if self._options.until_failure else self._options.max_fail
        if most is not None and self._failures >= most:
            self._stop(f"{self._failures} test{'s' if self._failures > 1 else ''} failed")

    # -- an early end

    def _stop(self, reason: str) -> None:
        if not self._stopping:
            self._stopping = True
            self._unfinished += [one for unit in self._queue.clear() for one in _tests_of(unit)]
            self._report(Stopping(reason))

    def _interrupt(self, reason: str) -> None:
        """The first time, escalate for all running units (SIGTERM, then SIGKILL); the second time, kill them."""
        self._interrupts += 1
        self._stop(reason)
        self._memory.give_up()
        for running in tuple(self._running.values()):
            if self._interrupts == 1:
                running.end(EndCause.INTERRUPTED)
            else:
                running.kill()

    def _break(self, error: str) -> None:
        """Keep what is known so far, after an exception of ours: processes end when the zygote is closed."""
        self._error = error
        self._stopping = True
        self._unfinished += [one for unit in self._queue.clear() for one in _tests_of(unit)]
        with suppress(Exception):
            self._memory.give_up()
        running, self._running = self._running, {}
        for one in running.values():
            self._unfinished += _tests_of(one.unit)
            with suppress(Exception):  # the exception may be one about this unit's results
                self.results(one, one.abandon())

    def _finish_cut_short(self) -> None:
        """A test that failed and was not retried, because the run ended before, has failed."""
        for key, attempts in self._attempts.items():
            if key not in self._done:
                self._finish(FinishedTest(tuple(attempts)))

    # -- a user asks which tests are running

    def _ask(self) -> None:
        if self._question is None:
            self._question = Question(tuple(self._running.values()), self._answer)
            self._place.loop.after(PATIENCE_FOR_STACKS, self._question.close)
            self._question.ask()

    def _answer(self, event: StatusRequested) -> None:
        self._question = None
        self._report(event)

    # -- with -s: the output of tests, as it arrives

    @contextmanager
    def _showing_output(self) -> Iterator[None]:
        self._copy_output()
        yield
        if self._copying is not None:
            self._copying.cancel()

    def _copy_output(self) -> None:
        if self._options.stream:
            for running in self._running.values():
                self._copy_output_of(running)
            self._copying = self._place.loop.after(STREAM_INTERVAL, self._copy_output)

    def _copy_output_of(self, running: UnitHandle) -> None:
        if self._options.stream and (text := running.new_output()):
            self._report(Output(running.test.id, text))

    def _summary(self) -> Summary:
        unfinished = (test for test, repetition in self._unfinished if (test.id, repetition) not in self._done)
        return Summary(
            tuple(self._finished),
            self._now(),
            self._options.policy,
            self._interrupts > 0,
            tuple(dict.fromkeys(unfinished)),
            tuple(self._warnings),
            self._error,
        )


def _tests_of(unit: Unit) -> list[tuple[Test, int]]:
    return [(test, unit.repetition) for test in unit.tests]


def _attempt_of(unit: Unit, test: Test) -> tuple[TestId, int, int]:
    return test.id, unit.repetition, unit.attempt


def _names_of(tests: Sequence[Test]) -> str:
    """`test_x.py::T::test_a runs`, or for several tests `test_x.py::T::test_a and 3 more run`."""
    more = len(tests) - 1
    return f"{tests[0].id} and {more} more run" if more else f"{tests[0].id} runs"


def _skipped(test: Test) -> Attempt:
    return Attempt(test, TestOutcome.SKIPPED, test.skip or "", want=test.want, lease=Lease())
