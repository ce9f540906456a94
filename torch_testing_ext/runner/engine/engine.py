"""The engine: dispatches units to places, until all have ended."""

import functools
import itertools
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from torch_testing_ext._collectives.failure import describe_world
from torch_testing_ext._collectives.sanitizer_kinds import not_of_threads, read_kinds
from torch_testing_ext._machine import fake_accelerator
from torch_testing_ext._machine.device_rules import bare_uuid
from torch_testing_ext._machine.machine_resources import leased_by_ancestors, leased_for, leased_port
from torch_testing_ext._machine.nvml import NvmlError, Usage
from torch_testing_ext._process import system, user_commands
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.words import size_in_words
from torch_testing_ext.runner import model
from torch_testing_ext.runner.model import (
    COUNTS_AS,
    Attempt,
    Category,
    Lease,
    RunHeader,
    Summary,
    Test,
    TestEnd,
    TestOutcome,
    Unit,
    WaitingForDevices,
)
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.processes.file_processes import FileProcesses
from torch_testing_ext.runner.scheduling.leases import Inventory, Queue, RunLeases, environment_of
from torch_testing_ext.runner.scheduling.plan import Plan

from .other_runs import OtherRuns
from .running_unit import LiveView, RunningUnit, UnitHandle, UnitListener
from .signals_and_keys import signals_and_keys
from .unit_log import EndCause, Results

# --------------------------------------------------------------------------------------------------------------------
# The memory of a lease's devices: the lease is over only when they have it back after its processes have ended.
#
# The driver frees the memory of a killed process a moment after its end. If it does not, the next test on the device
# would have too little memory: the device is not used again in this run, and the report names what holds its memory.

TIMEOUT = 10.0
INTERVAL = 0.2
# A process that uses CUDA has more than this; what the driver keeps for itself is less.
MARGIN = 128 * 2**20


@dataclass(frozen=True)
class HeldDevice:
    """A device whose memory has not come back."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"device {self.name} {self.why}"


@dataclass
class _Waiting:
    names: tuple[str, ...]
    then: Callable[[tuple[HeldDevice, ...]], None]
    until: float


class MemorySource(Protocol):
    """Knows how much memory of devices is in use: NVML, or what counts that of fake accelerators."""

    def usage(self) -> Mapping[str, Usage]:
        """The use of each device, by its UUID. Raises NvmlError without an answer."""

    def close(self) -> object:
        """Ask no more."""


@dataclass
class MemoryReturn:
    """Compares the memory in use before a lease and after it. Without NVML, every lease is over at once."""

    loop: EventLoop
    nvml: MemorySource | None = None
    # As NVML gives them, by each device's name in this run.
    uuids: Mapping[str, str] = field(default_factory=dict)
    warn: Callable[[str], object] = lambda text: None
    timeout: float = TIMEOUT
    # Called with the name of each device that is held.
    quarantine: Callable[[str], object] = lambda name: None
    # Whether a process may be one of this run.
    is_ours: Callable[[int], bool] = lambda pid: True
    # Devices that are not used again in this run.
    held: tuple[HeldDevice, ...] = ()
    # Devices whose memory others have been seen to take during a test.
    _taken_by_others: set[str] = field(default_factory=set)
    _baseline: dict[str, Usage] = field(default_factory=dict)
    # Leases of each device.
    _users: Counter[str] = field(default_factory=Counter)
    _waiting: list[_Waiting] = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        """Whether the memory of a lease that has ended is not back yet."""
        return bool(self._waiting)

    def leased(self, names: Iterable[str]) -> None:
        """A unit gets these devices: note what is in use now, unless another unit of this run uses the device, too."""
        first = [name for name in names if not self._users[name]]
        self._users.update(names)
        usage = self._usage() if first else None
        if usage is None:
            return
        for name in first:
            if name in usage:
                self._baseline[name] = usage[name]

    def when_back(self, names: Sequence[str], then: Callable[[tuple[HeldDevice, ...]], None]) -> None:
        """The processes of a lease have ended: call `then` when the memory is back, or with those that hold theirs."""
        self._users.subtract(names)
        unused = [name for name in names if self._users[name] <= 0 and name in self._baseline]
        held = self._held(unused)
        if not held:
            then(())
            return
        held_names = tuple(device.name for device in held)
        waiting = _Waiting(held_names, then, time.monotonic() + self.timeout)
        self._waiting.append(waiting)
        self.loop.after(INTERVAL, lambda: self._look_again(waiting))

    def _look_again(self, waiting: _Waiting) -> None:
        if waiting not in self._waiting:
            return
        held = self._held(waiting.names)
        if held and time.monotonic() < waiting.until:
            self.loop.after(INTERVAL, lambda: self._look_again(waiting))
            return
        self._waiting.remove(waiting)
        for device in held:
            self.quarantine(device.name)
        self.held += held
        waiting.then(held)

    def give_up(self) -> None:
        """The run ends: wait for nothing any more."""
        given_up = self._waiting
        self._waiting = []
        for waiting in given_up:
            waiting.then(())

    def close(self) -> None:
        """No lease is taken any more."""
        if self.nvml is not None:
            self.nvml.close()

    def _held(self, names: Sequence[str]) -> tuple[HeldDevice, ...]:
        """The devices, of these, whose memory is not back now."""
        usage = self._usage() if names else None
        if usage is None:
            return ()
        held = []
        for name in names:
            if name not in usage:
                continue
            others = taken_by_others(self._baseline[name], usage[name], self.is_ours)
            why = why_held(self._baseline[name], usage[name], sum(others.values()))
            if why:
                held.append(HeldDevice(name, f"{why} {self.timeout:g} s after its test ended"))
            elif sum(others.values()) > MARGIN and name not in self._taken_by_others:
                self._taken_by_others.add(name)
                holders = ", ".join(describe_process(pid) for pid in others)
                more = size_in_words(sum(others.values()))
                self.warn(f"device {name}: other programs have taken {more} of its memory during a test: {holders}")
        return tuple(held)

    def _usage(self) -> Mapping[str, Usage] | None:
        """The use of each device, by its name in this run; None if NVML does not say."""
        if self.nvml is None:
            return None
        try:
            by_uuid = self.nvml.usage()
        except NvmlError as error:
            self.nvml = None
            self.warn(f"device memory is no longer checked between tests: {error}")
            return None
        return {name: by_uuid[uuid] for name, uuid in self.uuids.items() if uuid in by_uuid}


def taken_by_others(before: Usage, after: Usage, is_ours: Callable[[int], bool]) -> dict[int, int]:
    """The bytes that processes of others have taken in the meantime, as far as NVML knows, by process.

    What was there before is of others, since no process of a lease outlives it.
    """
    known = {process.pid: process.memory for process in before.processes}
    taken = {}
    for process in after.processes:
        is_new = process.pid not in known
        if process.memory is None or (is_new and is_ours(process.pid)):
            continue
        more = process.memory - (known.get(process.pid) or 0)
        if more > 0 and (is_new or known[process.pid] is not None):
            taken[process.pid] = more
    return taken


def why_held(before: Usage, after: Usage, by_others: int = 0) -> str | None:
    """Why a device is not as it was before, to follow its name; None if it is. `by_others`: bytes that do not count."""
    if before.memory is None:
        return None
    if after.memory is None:
        return f"did not answer ({after.trouble or 'no reason given'})"
    more = after.memory - before.memory - by_others
    if more <= MARGIN:
        return None
    known = {process.pid for process in before.processes}
    new = [process.pid for process in after.processes if process.pid not in known]
    holders = ", ".join(describe_process(pid) for pid in new)
    if not holders:
        holders = "no process that NVML names"
    return f"still had {size_in_words(more)} more in use than before (held by {holders})"


def describe_process(pid: int) -> str:
    """A process by its number and command; in a container, by its number, which is one of the host."""
    if not system.has_pids_of_host():
        return f"pid {pid} of the host"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return f"pid {pid} (not a process that can be seen from here)"
    words = " ".join(command.replace(b"\0", b" ").decode("utf-8", "replace").split())
    return f"pid {pid} ({words[:100]})" if words else f"pid {pid}"


def with_held(attempts: Sequence[Attempt], held: Sequence[HeldDevice]) -> list[Attempt]:
    """The results of a unit, of which the last says that devices did not get their memory back."""
    if not attempts or not held:
        return list(attempts)
    *others, last = attempts
    text = "\n".join(f"{device}; it is not used again in this run" for device in held)
    outcome = last.outcome
    if COUNTS_AS[outcome] is Category.PASSED:
        outcome = TestOutcome.LEAKED
    if last.failure is not None:
        end = replace(last.end, outcome=outcome, failure=last.failure.with_remark_in_account(text))
    else:
        message = f"{last.message}\n\n{text}" if last.message else text
        end = replace(last.end, outcome=outcome, message=message)
    return [*others, replace(last, end=end)]


def uuids_for(identities: Mapping[str, str], names: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """The UUIDs by which NVML knows devices, by their names in this run. CUDA's have no prefix."""
    by_bare = {bare_uuid(uuid): uuid for uuid in known}
    uuids = {}
    for name in names:
        wanted = bare_uuid(identities.get(name, name))
        matches = [uuid for bare, uuid in by_bare.items() if _is_meant(wanted, bare)]
        if len(matches) == 1:
            uuids[name] = matches[0]
    return uuids


def _is_meant(wanted: str, bare: str) -> bool:
    """Whether the UUID is the wanted one, which may be abbreviated."""
    return bare == wanted or (len(wanted) >= 8 and bare.startswith(wanted))


# --------------------------------------------------------------------------------------------------------------------
# Starts the units that wait as leases become free: the queue decides which is next, the leases what it gets.


@dataclass
class Dispatcher:
    """The units of a run that have not ended, and their leases."""

    queue: Queue
    leases: RunLeases
    memory: MemoryReturn
    loop: EventLoop
    others: OtherRuns | None = None
    # Units of each file that have not ended.
    _left: Counter[str] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    # -- units

    def begin(self, units: Iterable[Unit]) -> None:
        """Note the units that the queue has from the start."""
        units = tuple(units)
        self._numbers = itertools.count(max((unit.number for unit in units), default=-1) + 1)
        self._left.update(unit.file for unit in units)

    def add(self, unit: Unit) -> None:
        self._left[unit.file] += 1
        self.queue.add(replace(unit, number=next(self._numbers)))

    def end(self, unit: Unit) -> bool:
        """Note that a unit has ended. Returns whether it was the last of its file."""
        self._left[unit.file] -= 1
        return not self._left[unit.file]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self._left)

    def drop_hopeless(self) -> tuple[tuple[Unit, ...], str]:
        """Remove and return the units for which too few devices are left, and why."""
        if not self.memory.held:
            return (), ""
        units = self.queue.drop(lambda unit: not self.leases.may_fit(unit))
        devices = "; ".join(str(device) for device in self.memory.held)
        return units, f"too few devices are left: {devices}"

    @property
    def is_waiting(self) -> bool:
        """Whether something other than a running unit is to come: memory of a lease, or devices of other runs."""
        if self.memory.is_waiting:
            return True
        return self.others is not None and self.others.are_awaited

    # -- leases

    def dispatch(self, start: Callable[[Unit, Lease], None]) -> None:
        """Start each unit that fits now."""
        started = True
        while started:
            if self.others is None:
                started = self._start_next(start)
            else:
                with self.others.choosing(self.queue.wants_devices):
                    started = self._start_next(start)

    def _start_next(self, start: Callable[[Unit, Lease], None]) -> bool:
        unit = self.queue.take(self.leases.free_devices, self.leases.free_slots)
        if unit is None:
            return False
        lease = self.leases.take(unit)
        self.memory.leased(lease.devices)
        start(unit, lease)
        return True

    def wait_for_others(self) -> WaitingForDevices | None:
        """If other runs have the devices that are missing, try again in a moment. Returns what the user has to know."""
        if self.others is None:
            return None
        return self.others.wait(self.queue.wants_devices, self.loop)

    def give_back(self, lease: Lease) -> None:
        self.leases.give_back(lease)
        if self.others is not None:
            self.others.give_back(lease)


# --------------------------------------------------------------------------------------------------------------------
# The place where units run: the seam between the engine, which decides, and the processes. LocalPlace is this
# machine.
#
# A cluster is another place (runner/cluster/cluster_site.py): on each of its nodes, an agent has a LocalPlace.


class Place:
    """Starts units and owns their processes."""

    loop: EventLoop

    def start(self, unit: Unit, lease: Lease, listener: UnitListener) -> UnitHandle:
        """Start a unit. Raises OSError if the system refuses what it needs."""
        raise NotImplementedError

    def close_file(self, name: str) -> None:
        """End the process of a file, of which no unit runs or waits."""

    def wait_for_more(self) -> bool:
        """No unit runs, and none that waits fits: whether this can change, so that waiting makes sense."""
        return False

    @property
    def shortage(self) -> str:
        """Why units that wait fit nowhere, in words."""
        return "it does not fit on this machine"

    def is_finishing(self) -> bool:
        """The last unit has ended: whether something else is still to come, such as files from other machines."""
        return False

    def hurry(self) -> None:
        """The user has interrupted the run twice: wait for nothing that may not come."""


@dataclass
class LocalPlace(Place):
    """This machine: units run in the processes of a preloaded server, which are killed when the user is in a hurry."""

    files: FileProcesses
    options: Options
    inventory: Inventory
    others: OtherRuns | None = None
    # About a test whose name is appended; None for those of the options.
    command: str | None = None
    show_command: str | None = None
    # Of NCCL's RAS.
    _ports: ExitStack = field(default_factory=ExitStack)
    _port_of: dict[tuple[str | int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = self.files.loop

    def _address_of_ras(self, lease: Lease) -> dict[str, str]:
        """The address of NCCL's status: by default, all jobs of a machine would use the same port."""
        if not lease.devices:
            return {}
        # Only one unit at a time has them.
        place: tuple[str | int, ...] = (*lease.devices[:1], *lease.slots[:1])
        if place not in self._port_of:
            self._port_of[place] = self._ports.enter_context(leased_port())
        return {"NCCL_RAS_ADDR": f"localhost:{self._port_of[place]}"}

    def start(self, unit: Unit, lease: Lease, listener: UnitListener) -> RunningUnit:
        """Start a unit in processes of this machine."""
        environ = {**environment_of(lease, self.inventory), **self._address_of_ras(lease)}
        locks: tuple[int, ...] = ()
        if lease.devices:
            # Also if this run agrees with no other: what the test starts waits for none of these.
            identities = map(self.inventory.identity_of, lease.devices)
            environ.update(leased_for(identities, leased_by_ancestors(os.environ)))
        if self.others is not None:
            locks = self.others.locks.descriptors(lease.devices)
        environ.update(self.options.environment_of_sanitizer(unit.repetition))
        environ.update(self.options.environment_of_debugger())
        show_command = self.options.show_command if self.show_command is None else self.show_command
        return RunningUnit(
            unit,
            lease,
            self.files,
            self.options,
            environ,
            listener,
            self.options.command_of(unit.repetition, self.command),
            show_command,
            locks,
        )

    def close_file(self, name: str) -> None:
        self.files.file(name).close()


# --------------------------------------------------------------------------------------------------------------------
# The engine that runs the units of a plan: starts units, retries tests, ends the run.
#
# It sends events to reporters and prints nothing. The dispatcher decides which unit begins next and with which lease,
# a `Place` where and how it runs: here, or on the nodes of a cluster. `Results` decides which tests run
# again.

NO_HEADER = RunHeader()


class Engine(UnitListener):
    """Runs a plan and sends its events to a reporter."""

    def __init__(
        self,
        place: Place,
        options: Options,
        inventory: Inventory,
        leases: RunLeases,
        queue: Queue,
        reporter: model.Reporter,
        header: RunHeader = NO_HEADER,
        memory: MemoryReturn | None = None,
        others: OtherRuns | None = None,
    ):
        """`memory`: of the devices of this machine, if it is checked. `others`: runs with which it shares these."""
        self.place = place
        self.options = options
        self.inventory = inventory
        self.header = header
        self._report = reporter.on_event
        self._memory = memory or MemoryReturn(place.loop)
        self._dispatcher = Dispatcher(queue, leases, self._memory, place.loop, others)
        self._results = Results(options, self._report, self._stop)
        self._running: dict[int, UnitHandle] = {}
        self._view = LiveView(self._running, place.loop, self._report, options.stream)
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
        error = ""
        try:
            self._report(_run_began(plan, broken, self.options, self.inventory, self.header))
            for attempt in _known_results(plan, broken):
                self._results.take(attempt, may_retry=False)
            keys = signals_and_keys(
                self.place.loop,
                self._interrupt,
                self._view.show_status,
                with_keys=not self.options.pdb,
            )
            with keys, self._view.showing_output():
                reason = interrupted()
                if reason:
                    self._interrupt(reason)
                self._run_all(plan)
                while self._interrupts < 2 and self.place.is_finishing():
                    self.place.loop.step()
            for file in self._dispatcher.files:
                self.place.close_file(file)
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
            or (queue and self.place.wait_for_more())
        ):
            self.place.loop.step()
            self._dispatch()
            is_idle = not (self._running or self._memory.is_waiting or queue)
            if is_idle and self.options.endless and not self._stopping:
                self._repeat(plan)
        if queue:
            self._stopping = True
            self._report(model.Stopping(self.place.shortage))
            for unit in queue.clear():
                self._fail_unit(unit, Lease(), self.place.shortage)

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
        self._report(model.UnitBegan(unit, lease, self._now()))
        try:
            self._running[unit.number] = self.place.start(unit, lease, self)
        except OSError as error:
            # The system refused what the unit needs, such as space in a folder.
            self._fail_unit(unit, lease, user_commands.why_no_working_folder() or system.why_refused(error))
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
        self._report(model.UnitEnded(unit, lease, self._now()))

    def _end(self, unit: Unit) -> None:
        """A unit has ended: close the process of its file after the last one, unless the plan may be repeated."""
        is_last = self._dispatcher.end(unit)
        if is_last and not self.options.endless:
            self.place.close_file(unit.file)

    def _queue_again(self, unit: Unit, tests: tuple[Test, ...], attempt: int) -> None:
        alone = self._results.must_be_alone(tests, unit.repetition)
        self._dispatcher.add(replace(unit, tests=tests, attempt=attempt, alone=alone))

    # -- events of running units

    def test_began(self, running: UnitHandle, test: Test) -> None:
        self._report(model.TestBegan(test, running.unit, running.lease, self._now()))

    def test_is_slow(self, running: UnitHandle, test: Test, seconds: float) -> None:
        self._report(model.TestIsSlow(test, seconds, running.lease))

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
            self._report(model.Stopping(reason))

    def _interrupt(self, reason: str) -> None:
        """The first time, escalate for all running units (SIGTERM, then SIGKILL); the second time, kill them."""
        self._interrupts += 1
        self._stop(reason)
        self._memory.give_up()
        if self._interrupts > 1:
            self.place.hurry()
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


def _notes(options: Options, inventory: Inventory) -> Iterator[str]:
    """Lines for the header of the run, about all of its tests."""
    if options.world is not None:
        yield describe_world(options.world)
    if inventory.kind == fake_accelerator.KIND:
        yield fake_accelerator.describe(len(inventory.names))
    if options.sanitize and (note := not_of_threads(read_kinds(options.sanitize))):
        yield note


def _run_began(
    plan: Plan,
    broken: Sequence[Attempt],
    options: Options,
    inventory: Inventory,
    header: RunHeader,
) -> model.RunBegan:
    """The event with which a run begins."""
    broken_files = [attempt.test for attempt in broken]
    return model.RunBegan(
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
        note="\n".join(_notes(options, inventory)),
    )
