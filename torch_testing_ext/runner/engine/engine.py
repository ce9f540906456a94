"""The engine that runs the units of a plan.

It sends events to reporters and prints nothing. The dispatcher decides which unit begins next and with which lease,
a `RunSite` where and how it runs: here, or on the nodes of a cluster. `Results` decides which tests run
again.
"""

import functools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from torch_testing_ext._process import user_commands
from torch_testing_ext._tests import system_refusals
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch.aspects.output import SHOWN
from torch_testing_ext.runner import aspects_of_run, events
from torch_testing_ext.runner.model import Attempt, Lease, RunHeader, Summary, Test, TestEnd, Unit
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.plan import Plan
from torch_testing_ext.runner.scheduling.protocol import RunLeases
from torch_testing_ext.runner.scheduling.unit_queue import Queue
from torch_testing_ext.runner.site_protocol import RunSite

from .dispatcher import Dispatcher
from .live_view import LiveView
from .memory_return import HeldDevice, MemoryReturn, with_held
from .other_runs import OtherRuns
from .results_of_tests import Results
from .running_unit import UnitHandle, UnitListener
from .signals_and_keys import signals_and_keys
from .unit_log import EndCause

NO_HEADER = RunHeader()


class Engine(UnitListener):
    """Runs a plan and sends its events to a reporter."""

    def __init__(
        self,
        site: RunSite,
        options: Options,
        inventory: Inventory,
        leases: RunLeases,
        queue: Queue,
        reporter: events.Reporter,
        header: RunHeader = NO_HEADER,
        memory: MemoryReturn | None = None,
        others: OtherRuns | None = None,
    ):
        """`memory`: of the devices of this machine, if it is checked. `others`: runs with which it shares these."""
        self.site = site
        self.options = options
        self.inventory = inventory
        self.header = header
        self._report = reporter.on_event
        self._memory = memory or MemoryReturn(site.loop)
        self._dispatcher = Dispatcher(queue, leases, self._memory, site.loop, others)
        self._results = Results(options, self._report, self._stop)
        self._running: dict[int, UnitHandle] = {}
        self._view = LiveView(self._running, site.loop, self._report, options.value(SHOWN))
        self._began = 0.0
        self._stopping = False
        self._interrupts = 0
        # The last one of a run without end.
        self._repetition = 0

    def run(
        self,
        plan: Plan,
        broken: Sequence[Attempt] = (),
        interrupted: Callable[[], str | None] = lambda: None,
    ) -> Summary:
        """Run the whole plan; no event reports its end. `broken`: files that could not be imported.

        `interrupted` is asked once, at the start, for the signal that has interrupted the run already. An exception
        ends the run, but not its reports: the summary has it, and all results so far.
        """
        self._began = time.monotonic()
        self._dispatcher.begin(plan.units)
        self._results.new = plan.new
        error = ""
        try:
            self._report(_run_began(plan, broken, self.options, self.inventory, self.header))
            for attempt in _known_results(plan, broken):
                self._results.take(attempt, may_retry=False)
            keys = signals_and_keys(
                self.site.loop,
                self._interrupt,
                self._view.show_status,
                with_keys=not self.options.takes_terminal,
            )
            with keys, self._view.showing_output():
                reason = interrupted()
                if reason:
                    self._interrupt(reason)
                self._run_all(plan)
                while self._interrupts < 2 and self.site.is_finishing():
                    self.site.loop.step()
            for file in self._dispatcher.files:
                self.site.close_file(file)
        except Exception:
            error = traceback.format_exc()
            self._abandon()
        self._memory.close()
        return self._results.summary(self._now(), self._interrupts > 0, error)

    def _now(self) -> float:
        return time.monotonic() - self._began

    # -- units

    def _run_all(self, plan: Plan) -> None:
        """Run units until none is left, or until those that are left can never start."""
        queue = self._dispatcher.queue
        self._dispatch()
        while (
            self._running
            or self._dispatcher.is_waiting
            # Nodes may come.
            or (queue and self.site.wait_for_more())
        ):
            self.site.loop.step()
            self._dispatch()
            is_idle = not (self._running or self._memory.is_waiting or queue)
            if is_idle and self.options.endless and not self._stopping:
                self._repeat(plan)
        if queue:
            self._stopping = True
            self._report(events.Stopping(self.site.shortage))
            for unit in queue.clear():
                self._fail_unit(unit, Lease(), self.site.shortage)

    def _repeat(self, plan: Plan) -> None:
        """Add each unit of the plan once: a run without end has no number of repetitions."""
        self._repetition += 1
        for unit in plan.units:
            self._dispatcher.add(replace(unit, repetition=self._repetition))
        self._dispatch()

    def _dispatch(self) -> None:
        hopeless, why = self._dispatcher.drop_hopeless()
        for unit in hopeless:
            self._fail_unit(unit, Lease(), why)
            self._end(unit)
        self._dispatcher.dispatch(self._start)
        waiting = self._dispatcher.wait_for_others()
        if waiting is not None:
            self._report(waiting)

    def _start(self, unit: Unit, lease: Lease) -> None:
        self._report(events.UnitBegan(unit, lease, self._now()))
        try:
            self._running[unit.number] = self.site.start(unit, lease, self)
        except OSError as error:
            # The system refused what the unit needs, such as space in a folder.
            self._fail_unit(unit, lease, user_commands.why_no_working_folder() or system_refusals.why_refused(error))
            self._memory.when_back(lease.devices, lambda held: None)
            self._give_back(unit, lease)
            self._end(unit)

    def _fail_unit(self, unit: Unit, lease: Lease, why: str) -> None:
        message = f"it was not run: {why}"
        self._fail(unit, lease, TestOutcome.ERROR, [(test, message) for test in unit.tests])

    def _fail(self, unit: Unit, lease: Lease, outcome: TestOutcome, failed: Iterable[tuple[Test, str]]) -> None:
        """Take results of tests, each with its message, that no process reports."""
        attempts = []
        for test, message in failed:
            attempt = Attempt(
                test,
                TestEnd(outcome, message),
                began=self._now(),
                repetition=unit.repetition,
                number=unit.attempt,
                lease=lease,
            )
            attempts.append(attempt)
        self._take_all(unit, attempts)

    def _give_back(self, unit: Unit, lease: Lease, held: tuple[HeldDevice, ...] = ()) -> None:
        self._dispatcher.give_back(lease)
        for device in held:
            self._results.warn(f"{device}; it is not used again in this run")
        self._report(events.UnitEnded(unit, lease, self._now()))

    def _end(self, unit: Unit) -> None:
        """A unit has ended: close the process of its file after the last one, unless the plan may be repeated."""
        is_last = self._dispatcher.end(unit)
        if is_last and not self.options.endless:
            self.site.close_file(unit.file)

    def _queue_again(self, unit: Unit, tests: tuple[Test, ...], attempt: int) -> None:
        alone = self._results.must_be_alone(tests, unit.repetition)
        self._dispatcher.add(replace(unit, tests=tests, attempt=attempt, alone=alone))

    # -- events of running units

    def test_began(self, running: UnitHandle, test: Test) -> None:
        self._report(events.TestBegan(test, running.unit, running.lease, self._now()))

    def test_is_slow(self, running: UnitHandle, test: Test, seconds: float) -> None:
        self._report(events.TestIsSlow(test, seconds, running.lease))

    def results(self, running: UnitHandle, attempts: Iterable[Attempt]) -> None:
        """Take attempts that have ended; from here on, they begin at a time since the start of the run."""
        since_start = [replace(attempt, began=attempt.began - self._began) for attempt in attempts]
        self._take_all(running.unit, since_start)

    def unit_ended(self, running: UnitHandle, attempts: list[Attempt], rest: list[int]) -> None:
        self._view.copy_output_of(running)
        del self._running[running.unit.number]
        conclude = functools.partial(self._conclude, running, attempts, rest)
        self._memory.when_back(running.lease.devices, conclude)

    def _conclude(
        self,
        running: UnitHandle,
        attempts: list[Attempt],
        rest: list[int],
        held: tuple[HeldDevice, ...],
    ) -> None:
        """A unit has ended, and the memory of its devices is back, unless some of them are held."""
        unit = running.unit
        self.results(running, with_held(attempts, held))
        self._give_back(unit, running.lease, held)
        tests = tuple(unit.tests[number] for number in rest)
        if running.cause is EndCause.INTERRUPTED:
            self._results.leave(unit, unit.tests)
        elif self._stopping:
            self._results.leave(unit, tests)
        elif tests:
            self._queue_again(unit, tests, unit.attempt)
        self._end(unit)

    def unit_lost(self, running: UnitHandle, rest: list[int], why: str) -> None:
        """A node was lost with a unit: the tests without a result run again, as the same attempt, but only once."""
        unit = running.unit
        lease = running.lease
        del self._running[unit.number]
        self._give_back(unit, lease)
        tests = tuple(unit.tests[number] for number in rest)
        if self._stopping or running.cause is EndCause.INTERRUPTED:
            self._results.leave(unit, tests)
        else:
            lost_once, lost_twice = self._results.lose(unit, tests, why)
            if lost_once:
                self._queue_again(unit, lost_once, unit.attempt)
            self._fail(unit, lease, TestOutcome.CRASHED, lost_twice)
        self._end(unit)

    def _take_all(self, unit: Unit, attempts: Iterable[Attempt]) -> None:
        retried = []
        for attempt in attempts:
            if self._results.take(attempt, may_retry=not self._stopping):
                retried.append(attempt.test)
        if retried:
            self._queue_again(unit, tuple(retried), unit.attempt + 1)

    # -- an early end

    def _stop(self, reason: str) -> None:
        if not self._stopping:
            self._stopping = True
            self._results.leave_all(self._dispatcher.queue.clear())
            self._report(events.Stopping(reason))

    def _interrupt(self, reason: str) -> None:
        """The first time, escalate for all running units (SIGTERM, then SIGKILL); the second time, kill them."""
        self._interrupts += 1
        self._stop(reason)
        self._memory.give_up()
        if self._interrupts > 1:
            self.site.hurry()
        for running in tuple(self._running.values()):
            if self._interrupts == 1:
                running.end(EndCause.INTERRUPTED)
            else:
                running.kill()

    def _abandon(self) -> None:
        """Keep what is known so far, after an exception of ours: processes end when the place is closed."""
        self._stopping = True
        self._results.leave_all(self._dispatcher.queue.clear())
        with suppress(Exception):
            self._memory.give_up()
        self._results.leave_all(running.unit for running in self._running.values())
        self._running.clear()


def _known_results(plan: Plan, broken: Sequence[Attempt]) -> Iterator[Attempt]:
    """The results of tests that do not run: of broken files, and skips."""
    yield from broken
    for test in plan.skipped:
        yield Attempt(test, TestEnd(TestOutcome.SKIPPED, test.skip or "", want=test.want))


def _run_began(
    plan: Plan,
    broken: Sequence[Attempt],
    options: Options,
    inventory: Inventory,
    header: RunHeader,
) -> events.RunBegan:
    """The event with which a run begins."""
    broken_files = [attempt.test for attempt in broken]
    return events.RunBegan(
        tests=(*broken_files, *plan.tests),
        units=plan.units,
        devices=inventory.names,
        slots=options.jobs,
        clock=time.time(),
        seed=options.shuffle if isinstance(options.shuffle, int) else None,
        fake=inventory.fake,
        repetitions=options.repetitions,
        header=header,
        nodes=inventory.nodes,
        note=aspects_of_run.header(options),
    )
