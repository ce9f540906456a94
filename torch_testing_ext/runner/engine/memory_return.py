"""The memory of a lease's devices, which they have back before the lease is over.

The driver frees the memory of a killed process a moment after its end. If it does not, the next test on the device
would have too little memory: the device is not used again in this run, and the report names what holds its memory.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch_testing_ext._machine.nvml import Usage
from torch_testing_ext._machine.visible_devices import bare_uuid
from torch_testing_ext._process import system
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.questions import NoAnswer
from torch_testing_ext._process.words import size_in_words
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import Attempt

MEMORY_TIMEOUT = 10.0
LOOK_AT_MEMORY = 0.2
# A process that uses CUDA has more than this; what the driver keeps for itself is less.
MEMORY_MARGIN = 128 * 2**20


@dataclass(frozen=True)
class HeldDevice:
    """A device whose memory has not come back."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"device {self.name} {self.why}"


@dataclass
class _WaitingLease:
    names: tuple[str, ...]
    then: Callable[[tuple[HeldDevice, ...]], None]
    until: float


class MemorySource(Protocol):
    """Knows how much memory of devices is in use: NVML, or what counts that of fake accelerators."""

    def usage(self) -> Mapping[str, Usage]:
        """The use of each device, by its UUID. Raises NoAnswer without an answer."""

    def close(self) -> object:
        """Ask no more."""


@dataclass
class MemoryReturn:
    """Compares the memory in use before a lease and after it. Without NVML, every lease is over at once."""

    loop: EventLoop
    nvml: MemorySource | None = None
    # The UUIDs as NVML gives them, by each device's name in this run.
    uuids: Mapping[str, str] = field(default_factory=dict)
    warn: Callable[[str], object] = lambda text: None
    timeout: float = MEMORY_TIMEOUT
    # A function that is called with the name of each device that is held.
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
    _waiting: list[_WaitingLease] = field(default_factory=list)

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
        waiting = _WaitingLease(held_names, then, self.loop.clock() + self.timeout)
        self._waiting.append(waiting)
        self.loop.after(LOOK_AT_MEMORY, lambda: self._look_again(waiting))

    def _look_again(self, waiting: _WaitingLease) -> None:
        if waiting not in self._waiting:
            return
        held = self._held(waiting.names)
        if held and self.loop.clock() < waiting.until:
            self.loop.after(LOOK_AT_MEMORY, lambda: self._look_again(waiting))
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
            elif sum(others.values()) > MEMORY_MARGIN and name not in self._taken_by_others:
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
        except NoAnswer as error:
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
    if more <= MEMORY_MARGIN:
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
    return f"pid {pid} ({system.command_of(pid) or 'not a process that can be seen from here'})"


def with_held(attempts: Sequence[Attempt], held: Sequence[HeldDevice]) -> list[Attempt]:
    """The results of a unit, of which the last says that devices did not get their memory back."""
    if not attempts or not held:
        return list(attempts)
    *others, last = attempts
    text = "\n".join(f"{device}; it is not used again in this run" for device in held)
    outcome = last.outcome
    if outcome.counts_as is TestOutcome.PASSED:
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
