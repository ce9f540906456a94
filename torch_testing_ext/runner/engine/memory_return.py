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
from torch_testing_ext._machine.sharing import in_words
from torch_testing_ext._machine.visible_devices import bare_uuid
from torch_testing_ext._process.loop import EventLoop

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
    uuids: Mapping[str, str] = field(default_factory=dict)  # as NVML gives them, by each device's name in this run
    warn: Callable[[str], object] = lambda text: None
    timeout: float = TIMEOUT
    quarantine: Callable[[str], object] = lambda name: None  # called with the name of each device that is held
    held: tuple[HeldDevice, ...] = ()  # devices that are not used again in this run
    _baseline: dict[str, Usage] = field(default_factory=dict)
    _users: Counter[str] = field(default_factory=Counter)  # leases of each device
    _waiting: list[_Waiting] = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        """Whether the memory of a lease that has ended is not back yet."""
        return bool(self._waiting)

    def leased(self, names: Iterable[str]) -> None:
        """A unit gets these devices: note what is in use now, unless another unit of this run uses the device, too."""
        first = [name for name in names if not self._users[name]]
        self._users.update(names)
        if first and (usage := self._usage()) is not None:
            self._baseline.update({name: usage[name] for name in first if name in usage})

    def when_back(self, names: Sequence[str], then: Callable[[tuple[HeldDevice, ...]], None]) -> None:
        """The processes of a lease have ended: call `then` when the memory is back, or with those that hold theirs."""
        self._users.subtract(names)
        last = tuple(name for name in names if self._users[name] <= 0 and name in self._baseline)
        if not last or not (held := self._held(last)):
            then(())
            return
        waiting = _Waiting(tuple(one.name for one in held), then, time.monotonic() + self.timeout)
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
        for one in held:
            self.quarantine(one.name)
        self.held += held
        waiting.then(held)

    def give_up(self) -> None:
        """The run ends: wait for nothing any more."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.then(())

    def close(self) -> None:
        """No lease is taken any more."""
        if self.nvml is not None:
            self.nvml.close()

    def _held(self, names: Sequence[str]) -> tuple[HeldDevice, ...]:
        usage = self._usage()
        if usage is None:
            return ()
        found = ((name, why_held(self._baseline[name], usage[name])) for name in names if name in usage)
        return tuple(
            HeldDevice(name, f"{why} {self.timeout:g} s after its test had ended") for name, why in found if why
        )

    def _usage(self) -> Mapping[str, Usage] | None:
        """The use of each device, by its name in this run; None if NVML does not say."""
        if self.nvml is None:
            return None
        try:
            found = self.nvml.usage()
        except NvmlError as error:
            self.nvml = None
            self.warn(f"device memory is not checked any more between tests: {error}")
            return None
        return {name: found[uuid] for name, uuid in self.uuids.items() if uuid in found}


def why_held(before: Usage, after: Usage) -> str | None:
    """Why a device is not as it was before, to follow its name; None if it is."""
    if after.memory is None:
        return None if before.memory is None else f"did not answer ({after.trouble or 'no reason given'})"
    if before.memory is None or after.memory <= before.memory + MARGIN:
        return None
    known = {process.pid for process in before.processes}
    new = [process.pid for process in after.processes if process.pid not in known]
    holders = ", ".join(map(describe_process, new)) or "no process that NVML names"
    return f"still had {in_words(after.memory - before.memory)} more in use than before, held by {holders},"


def describe_process(pid: int) -> str:
    """A process by its number and command; in a container, NVML's numbers are those of the host."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return f"pid {pid} (not a process that can be seen from here)"
    return f"pid {pid} ({words[:100]})" if words else f"pid {pid}"


def with_held(attempts: Sequence[Attempt], held: Sequence[HeldDevice]) -> list[Attempt]:
    """The results of a unit, of which the last says that devices did not get their memory back."""
    if not attempts or not held:
        return list(attempts)
    *others, last = attempts
    text = "\n".join(f"{one}; it is not used again in this run" for one in held)
    outcome = TestOutcome.LEAKED if COUNTS_AS[last.outcome] is Category.PASSED else last.outcome
    if last.failure is not None:
        return [*others, replace(last, outcome=outcome, failure=last.failure.with_remark_in_account(text))]
    message = "\n\n".join(filter(None, (last.message, text)))
    return [*others, replace(last, outcome=outcome, message=message)]


def uuids_for(identities: Mapping[str, str], names: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """The UUIDs by which NVML knows devices, by their names in this run. CUDA's have no prefix."""
    by_bare = {bare_uuid(uuid): uuid for uuid in known}
    found = {}
    for name in names:
        bare = bare_uuid(identities.get(name, name))
        matches = [uuid for one, uuid in by_bare.items() if one == bare or (len(bare) >= 8 and one.startswith(bare))]
        if len(matches) == 1:
            found[name] = matches[0]
    return found
