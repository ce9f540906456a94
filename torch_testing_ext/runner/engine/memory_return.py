"""Whether a device's memory is back when the processes of a lease have ended: only then is the lease over.

The driver frees the memory of a killed process a moment after its end. If it does not, the next test on the device
would have too little memory: the device is not used again in this run, and the report names what holds its memory.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch_testing_ext._machine.nvml import NvmlError, NvmlProcess, Usage
from torch_testing_ext._machine.visible_devices import bare_uuid
from torch_testing_ext._process.loop import EventLoop
from torch_testing_ext._process.words import size_in_words

from ..model import COUNTS_AS, Attempt, Category, TestOutcome

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


@dataclass
class MemoryReturn:
    """Compares the memory in use before a lease and after it. Without NVML, every lease is over at once."""

    loop: EventLoop
    nvml: NvmlProcess | None = None
    # As NVML gives them, by each device's name in this run.
    uuids: Mapping[str, str] = field(default_factory=dict)
    warn: Callable[[str], object] = lambda text: None
    timeout: float = TIMEOUT
    # Called with the name of each device that is held.
    quarantine: Callable[[str], object] = lambda name: None
    # Devices that are not used again in this run.
    held: tuple[HeldDevice, ...] = ()
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
            why = why_held(self._baseline[name], usage[name]) if name in usage else None
            if why:
                held.append(HeldDevice(name, f"{why} {self.timeout:g} s after its test had ended"))
        return tuple(held)

    def _usage(self) -> Mapping[str, Usage] | None:
        """The use of each device, by its name in this run; None if NVML does not say."""
        if self.nvml is None:
            return None
        try:
            by_uuid = self.nvml.usage()
        except NvmlError as error:
            self.nvml = None
            self.warn(f"device memory is not checked any more between tests: {error}")
            return None
        return {name: by_uuid[uuid] for name, uuid in self.uuids.items() if uuid in by_uuid}


def why_held(before: Usage, after: Usage) -> str | None:
    """Why a device is not as it was before, to follow its name; None if it is."""
    if before.memory is None:
        return None
    if after.memory is None:
        return f"did not answer ({after.trouble or 'no reason given'})"
    if after.memory <= before.memory + MARGIN:
        return None
    known = {process.pid for process in before.processes}
    new = [process.pid for process in after.processes if process.pid not in known]
    holders = ", ".join(describe_process(pid) for pid in new)
    if not holders:
        holders = "no process that NVML names"
    more = size_in_words(after.memory - before.memory)
    return f"still had {more} more in use than before, held by {holders},"


def describe_process(pid: int) -> str:
    """A process by its number and command; in a container, NVML's numbers are those of the host."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return f"pid {pid} (not a process that can be seen from here)"
    words = command.replace(b"\0", b" ").decode("utf-8", "replace").strip()
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
        return [*others, replace(last, outcome=outcome, failure=last.failure.with_remark_in_account(text))]
    message = f"{last.message}\n\n{text}" if last.message else text
    return [*others, replace(last, outcome=outcome, message=message)]


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
