"""The engine that runs the units of a plan: starts units, retries tests, ends the run.

It sends events to reporters and prints nothing. The dispatcher decides which unit begins next and with which lease, a
place (place.py) where and how it runs: here, or on the nodes of a cluster. `Attempts` decides which tests run again.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from ..events import (
    Reporter,
    RunBegan,
    Stopping,
    TestBegan,
    TestIsSlow,
    UnitBegan,
    UnitEnded,
)
from ..model import Attempt, Lease, RunHeader, Summary, Test, TestOutcome, Unit
from ..options.options import Options
from ..scheduling.inventory import Inventory
from ..scheduling.plan import Plan
from ..scheduling.policy import Queue, RunLeases
from .attempts import Results
from .dispatcher import Dispatcher
from .live_view import LiveView
from .memory_return import HeldDevice, MemoryReturn, with_held
from .other_runs import OtherRuns
from .place import LostUnitListener, Place
from .running_unit import UnitHandle
from .signals_and_keys import signals_and_keys
from .unit_log import EndCause


class Engine(LostUnitListener):
    """Runs a plan and sends its events to a reporter."""

    def __init__(
        self,
        place: Place,
        options: Options,
        inventory: Inventory,
        leases: RunLeases,
        queue: Queue,
        reporter: Reporter,
        header: RunHeader | None = None,
        memory: MemoryReturn | None = None,
        others: OtherRuns | None = None,
    ):
        """`memory`: that of the devices of this machine, if it is checked. `others`: with which it shares these."""
        self._place = place
        self._options = options
        self._report = reporter.on_event
        self._describe_run = functools.partial(_run_began, options, inventory, header or RunHeader())
        self._dispatcher = Dispatcher(queue, leases, memory or MemoryReturn(place.loop), place.loop, others)
        self._results = Results(options, self._report, self._stop)
        self._running: dict[int, UnitHandle] = {}
        self._view = LiveView(self._running, place.loop, self._report, options.stream)
        self._began = time.monotonic()
        self._stopping = False
        self._interrupts = 0

    def run(
        self, plan: Plan, broken: Sequence[Attempt] = (), interrupted: Callable[[], str | None] = lambda: None
    ) -> Summary:
        """Run the whole plan; no event reports its end. `broken`: files that could not be imported.

        `interrupted` is asked once, at the start, for the signal that has interrupted the run already. An exception
        ends the run, but not its reports: the summary has it, and all results so far.
        """
        self._began = time.monotonic()
        self._dispatcher.begin(plan.units)
        error = ""
        try:
            self._report(self._describe_run(plan, broken))
            for attempt in (*broken, *map(_skipped, plan.skipped)):
                self._results.take(attempt, may_retry=False)
            with (
                signals_and_keys(self._place.loop, self._interrupt, self._view.show_status),
                self._view.showing_output(),
            ):
                if reason := interrupted():
                    self._interrupt(reason)
                self._run_all(plan)
            for file in self._dispatcher.files:
                self._place.close_file(file)
        except Exception:
            error = traceback.format_exc()
            self._abandon()
        self._dispatcher.close()
        return self._results.summary(self._now(), self._interrupts > 0, error)

    def _now(self) -> float:
        return time.monotonic() - self._began

    # -- units

    def _run_all(self, plan: Plan) -> None:
        self._dispatch()
        while (
            self._running
            or self._dispatcher.is_waiting
            or (self._dispatcher.has_units and self._place.wait_for_more())  # for nodes that may come
        ):
            self._place.loop.step()
            self._dispatch()
            idle = not (self._running or self._dispatcher.awaits_memory or self._dispatcher.has_units)
            if idle and self._options.endless and not self._stopping:
                self._repeat(plan)
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        """Fail the units that wait in vain."""
        if self._dispatcher.has_units:
            self._stopping = True
            self._report(Stopping(self._place.shortage))
            for unit in self._dispatcher.clear():
                self._fail_unit(unit, Lease(), self._place.shortage)

    def _repeat(self, plan: Plan) -> None:
        repetition = self._results.attempts.last_repetition + 1
        for unit in plan.units:
            if unit.repetition == 0:
                self._dispatcher.add(dataclasses.replace(unit, repetition=repetition))
        self._dispatch()

    def _dispatch(self) -> None:
        hopeless, why = self._dispatcher.drop_hopeless()
        for unit in hopeless:
            self._fail_unit(unit, Lease(), why)
            self._end(unit)
        self._dispatcher.dispatch(self._start)
        if (waiting := self._dispatcher.wait_for_others()) is not None:
            self._report(waiting)

    def _start(self, unit: Unit, lease: Lease) -> None:
        self._report(UnitBegan(unit, lease, self._now()))
        try:
            self._running[unit.number] = self._place.start(unit, lease, self)
        except OSError as error:  # the system refused what the unit needs, such as space in a folder
            self._fail_unit(unit, lease, str(error))
            self._dispatcher.when_back(lease, lambda held: None)
            self._give_back(unit, lease)
            self._end(unit)

    def _fail_unit(self, unit: Unit, lease: Lease, why: str) -> None:
        message = f"it was not run: {why}"
        self._fail(unit, lease, TestOutcome.ERROR, [(test, message) for test in unit.tests])

    def _fail(self, unit: Unit, lease: Lease, outcome: TestOutcome, failed: Iterable[tuple[Test, str]]) -> None:
        """Take results of tests, each with its message, that no process reports."""
        attempt = functools.partial(
            Attempt, began=self._now(), repetition=unit.repetition, number=unit.attempt, lease=lease
        )
        self._take_all(unit, [attempt(test, outcome, message) for test, message in failed])

    def _give_back(self, unit: Unit, lease: Lease, held: tuple[HeldDevice, ...] = ()) -> None:
        self._dispatcher.give_back(lease)
        for one in held:
            self._results.warn(f"{one}; it is not used again in this run")
        self._report(UnitEnded(unit, lease, self._now()))

    def _end(self, unit: Unit) -> None:
        """A unit has ended: close the process of its file after the last one, unless the plan may be repeated."""
        if self._dispatcher.end(unit) and not self._options.until_failure:
            self._place.close_file(unit.file)

    def _queue_again(self, unit: Unit, tests: tuple[Test, ...], attempt: int) -> None:
        """Run some tests of a unit in another one."""
        alone = self._results.attempts.must_be_alone(tests, unit.repetition)
        self._dispatcher.add(dataclasses.replace(unit, tests=tests, attempt=attempt, alone=alone))

    # -- events of running units

    def test_began(self, running: UnitHandle, test: Test) -> None:
        self._report(TestBegan(test, running.unit, running.lease, self._now()))

    def test_is_slow(self, running: UnitHandle, test: Test, seconds: float) -> None:
        self._report(TestIsSlow(test, seconds, running.lease))

    def results(self, running: UnitHandle, attempts: Iterable[Attempt]) -> None:
        """Take attempts that have ended; from here on, they begin at a time since the start of the run."""
        since_start = [dataclasses.replace(one, began=one.began - self._began) for one in attempts]
        self._take_all(running.unit, since_start)

    def unit_ended(self, running: UnitHandle, attempts: list[Attempt], rest: list[int]) -> None:
        self._view.copy_output_of(running)
        del self._running[running.unit.number]
        self._dispatcher.when_back(running.lease, functools.partial(self._conclude, running, attempts, rest))

    def _conclude(
        self, running: UnitHandle, attempts: list[Attempt], rest: list[int], held: tuple[HeldDevice, ...]
    ) -> None:
        """A unit has ended, and the memory of its devices is back, unless some of them are held."""
        unit = running.unit
        self.results(running, with_held(attempts, held))
        self._give_back(unit, running.lease, held)
        tests = tuple(unit.tests[number] for number in rest)
        if running.cause is EndCause.INTERRUPTED:
            self._results.attempts.leave(unit, unit.tests)
        elif self._stopping:
            self._results.attempts.leave(unit, tests)
        elif tests:
            self._queue_again(unit, tests, unit.attempt)
        self._end(unit)

    def unit_lost(self, running: UnitHandle, rest: list[int], why: str) -> None:
        """A node was lost with a unit: the tests without a result run again, as the same attempt, but only once."""
        unit, lease = running.unit, running.lease
        del self._running[unit.number]
        self._give_back(unit, lease)
        tests = tuple(unit.tests[number] for number in rest)
        if self._stopping or running.cause is EndCause.INTERRUPTED:
            self._results.attempts.leave(unit, tests)
        else:
            again, lost_twice = self._results.lose(unit, tests, why)
            if again:
                self._queue_again(unit, again, unit.attempt)
            self._fail(unit, lease, TestOutcome.CRASHED, lost_twice)
        self._end(unit)

    def _take_all(self, unit: Unit, attempts: Iterable[Attempt]) -> None:
        retried = tuple([one.test for one in attempts if self._results.take(one, may_retry=not self._stopping)])
        if retried:
            self._queue_again(unit, retried, unit.attempt + 1)

    # -- an early end

    def _stop(self, reason: str) -> None:
        if not self._stopping:
            self._stopping = True
            self._leave_waiting()
            self._report(Stopping(reason))

    def _leave_waiting(self) -> None:
        for unit in self._dispatcher.clear():
            self._results.attempts.leave(unit, unit.tests)

    def _interrupt(self, reason: str) -> None:
        """The first time, escalate for all running units (SIGTERM, then SIGKILL); the second time, kill them."""
        self._interrupts += 1
        self._stop(reason)
        self._dispatcher.give_up()
        for running in tuple(self._running.values()):
            if self._interrupts == 1:
                running.end(EndCause.INTERRUPTED)
            else:
                running.kill()

    def _abandon(self) -> None:
        """Keep what is known so far, after an exception of ours: processes end when the place is closed."""
        self._stopping = True
        self._leave_waiting()
        with suppress(Exception):
            self._dispatcher.give_up()
        running = tuple(self._running.values())
        self._running.clear()
        for one in running:
            self._results.attempts.leave(one.unit, one.unit.tests)
            with suppress(Exception):  # the exception may be one about this unit's results
                self.results(one, one.abandon())


def _run_began(
    options: Options, inventory: Inventory, header: RunHeader, plan: Plan, broken: Sequence[Attempt]
) -> RunBegan:
    return RunBegan(
        tests=(*(attempt.test for attempt in broken), *plan.tests),
        units=plan.units,
        devices=inventory.names,
        slots=options.jobs,
        clock=time.time(),
        seed=options.seed if options.shuffle else None,
        fake=inventory.fake,
        repetitions=options.repeat or 1,
        header=header,
        nodes=inventory.nodes,
    )


def _skipped(test: Test) -> Attempt:
    return Attempt(test, TestOutcome.SKIPPED, test.skip or "", want=test.want, lease=Lease())
