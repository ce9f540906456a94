"""The resources for which the processes of one machine compete: devices (masks, locks), memory, ports."""

import functools
import hashlib
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_testing_ext._process import words
from torch_testing_ext._process.locks import OwnedFile
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.private_folders import UnsafeFolder as UnsafeFolder, make_private
from torch_testing_ext._process.words import size_in_words

# --------------------------------------------------------------------------------------------------------------------
# The variables that mask accelerators: a process sees the devices that they name.

# By kind of accelerator: the variables that mask it, the one that takes precedence first.
MASKS = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    # These number the devices that ROCR_VISIBLE_DEVICES leaves.
    "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
    "hpu": ("HABANA_VISIBLE_MODULES",),
    "mlu": ("MLU_VISIBLE_DEVICES",),
    "musa": ("MUSA_VISIBLE_DEVICES",),
    "neuron": ("NEURON_RT_VISIBLE_CORES",),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}


def masks_of(kind: str) -> tuple[str, ...]:
    """The variables that mask accelerators of this kind, the one that takes precedence first.

    An accelerator that is not in the table is supposed to use the name that most have.
    """
    return MASKS.get(kind, (f"{kind.upper()}_VISIBLE_DEVICES",))


def all_masks(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Every variable that may mask an accelerator in a process with this environment."""
    known = {name for names in MASKS.values() for name in names}
    supposed = {name for name in environ if name.endswith("_VISIBLE_DEVICES")}
    # What a container gets, which is of no account in it.
    return frozenset((known | supposed) - {"NVIDIA_VISIBLE_DEVICES"})


# --------------------------------------------------------------------------------------------------------------------
# Locks on devices that all runs of a user on this machine share: one file for each device, locked by flock.
#
# The kernel frees a lock when the last process that has it is gone. That is not only the runner: the supervisor of a
# unit has it, too, so that a device stays locked until no process of the unit is left, even if the runner is killed.
# When a unit has ended in order, the runner unlocks the file itself, whoever else has inherited the descriptor. Files
# are never deleted, so no run can lock a file that another run has just replaced.
#
# No run waits for a device while it keeps another one idle, with one exception, of which there is one at a time: the
# run with the reservation keeps what it gets until its unit fits, and the others leave it those devices meanwhile. So
# runs cannot wait for each other, and none waits for ever.

# Set by the runner: which devices of this machine the test has leased, for runs that the test starts.
LEASED = "_TORCH_TESTING_EXT_LEASED"
# The folder of the locks, where it is not the default: of the user of pytest, or of the fake accelerators of a run.
LEASE_FOLDER = "_TORCH_TESTING_EXT_LEASE_FOLDER"
_RESERVATION = "reservation"


def default_folder() -> Path:
    """The same for all runs of this user, whatever their TMPDIR is."""
    base = Path("/tmp")
    if not base.is_dir():
        base = Path(tempfile.gettempdir())
    return base / f"torch_testing_ext-leases-{os.getuid()}"


def lease_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the locks: the one that the user has named, or the default."""
    named = environ.get(LEASE_FOLDER)
    return Path(named) if named else default_folder()


def leased_by_ancestors(environ: Mapping[str, str]) -> frozenset[str]:
    """The identities of devices that a run which started this one has leased for it."""
    identities = environ.get(LEASED, "").split(",")
    return frozenset(filter(None, identities))


def leased_for(identities: Iterable[str], ancestors: Collection[str]) -> dict[str, str]:
    """The environment variable that tells a process which devices are leased for it."""
    return {LEASED: ",".join(sorted({*ancestors, *identities}))}


class DeviceLocks:
    """The locks of one run. `identities`: what identifies each device on this machine, by its name in this run."""

    def __init__(self, folder: Path, identities: Mapping[str, str], owner: str, ancestors: Collection[str] = ()):
        """Raises OSError or UnsafeFolder. Later nothing does: all files are open then."""
        make_private(folder)
        self._identities = identities
        self._owner = owner
        self._ancestors = ancestors
        self._files = {name: _lock_file(folder, identity) for name, identity in identities.items()}
        self._locked: set[str] = set()
        self._reservation = _lock_file(folder, _RESERVATION)
        self._has_reservation = False

    def acquire(self, name: str) -> bool:
        """Lock a device, unless another run has locked it. It may be locked by this run already."""
        if name in self._locked or self._identities[name] in self._ancestors:
            return True
        if not self._files[name].try_lock(self._owner):
            return False
        self._locked.add(name)
        return True

    def release(self, name: str) -> None:
        """Unlock a device, which no process uses any more."""
        if name in self._locked:
            self._locked.remove(name)
            self._files[name].unlock()

    def descriptors(self, names: Iterable[str]) -> tuple[int, ...]:
        """The descriptors that keep devices locked, for the process that owns everything that uses them."""
        return tuple(self._files[name].fd for name in names if name in self._locked)

    def leased(self, names: Iterable[str]) -> dict[str, str]:
        """The environment variable that tells runs inside a unit which devices are leased for them."""
        return leased_for(map(self._identities.__getitem__, names), self._ancestors)

    def owner_of(self, name: str) -> str:
        """Names the run that has locked a device, in words; empty if it does not say."""
        return self._files[name].owner().strip()

    # -- the reservation

    def reserve(self) -> bool:
        """Have other runs leave the devices to this one, unless another run has the reservation."""
        wanted = json.dumps(list(self._identities.values()))
        self._has_reservation = self._has_reservation or self._reservation.try_lock(wanted)
        return self._has_reservation

    def end_reservation(self) -> None:
        if self._has_reservation:
            self._has_reservation = False
            self._reservation.unlock()

    def reserved_by_others(self) -> frozenset[str]:
        """The names of devices that another run has reserved. Those of ancestors are in use: it waits for their end."""
        if self._has_reservation or not self._reservation.is_locked():
            return frozenset()
        try:
            reserved = set(json.loads(self._reservation.owner()))
        except ValueError:
            # The file is being written.
            reserved = set(self._identities.values())
        reserved.difference_update(self._ancestors)
        return frozenset(name for name, identity in self._identities.items() if identity in reserved)

    def close(self) -> None:
        self.end_reservation()
        for name in list(self._locked):
            self.release(name)
        for file in (*self._files.values(), self._reservation):
            file.close()


def _lock_file(folder: Path, identity: str) -> OwnedFile:
    """The file to lock for a device. Its content is for people; that of the reservation is for runs."""
    readable = words.file_name(identity)[:100]
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return OwnedFile(folder / (readable if readable == identity.lstrip(".") else f"{readable}-{digest}"))


# --------------------------------------------------------------------------------------------------------------------
# The use of this machine's memory, in all and by process.


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use, and how many there are."""

    used: int
    limit: int

    @property
    def share(self) -> float:
        return self.used / self.limit

    def __str__(self) -> str:
        return f"{100 * self.share:.0f} % of its {size_in_words(self.limit)} of memory"


@dataclass(frozen=True)
class MachineMemory:
    """The memory of this machine, or of the cgroup (version 1 or 2) that this process is in.

    What the kernel would free, such as the cache of files, does not count as used.
    """

    root: Path = Path("/")

    def use(self) -> MemoryUse | None:
        """The memory that is closest to its limit; None if the system does not show it."""
        uses = list(self._of_groups())
        of_machine = self.of_machine()
        if of_machine is not None:
            uses.append(of_machine)
        return max(uses, key=lambda use: use.share, default=None)

    def of_machine(self) -> MemoryUse | None:
        fields = _numbers(self.root / "proc/meminfo")
        total = fields.get("MemTotal:")
        available = fields.get("MemAvailable:")
        if not total or available is None:
            return None
        return MemoryUse((total - available) << 10, total << 10)

    def _of_groups(self) -> Iterator[MemoryUse]:
        """One for each cgroup around this process that has a limit."""
        mounts = self.root / "sys/fs/cgroup"
        for line in text_of(self.root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                mount = mounts
                names = ("memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                mount = mounts / "memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            else:
                continue
            for folder in _upwards(mount, path):
                use = _of_group(folder, *names)
                if use is not None:
                    yield use


def _upwards(mount: Path, path: str) -> list[Path]:
    """A cgroup and all around it. In a container, the path may be one that is not shown there."""
    folder = mount / path.strip("/")
    around = [parent for parent in folder.parents if parent.is_relative_to(mount)]
    return [folder, *around]


def _of_group(folder: Path, limit: str, current: str, prefix: str) -> MemoryUse | None:
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / current).read_text())
    except (OSError, ValueError):
        return None
    if not most.isdecimal() or not int(most):
        return None
    fields = _numbers(folder / "memory.stat")
    reclaimable = ("inactive_file", "active_file", "slab_reclaimable")
    cached = sum(fields.get(prefix + name, 0) for name in reclaimable)
    return MemoryUse(max(0, used - cached), int(most))


def _numbers(file: Path) -> dict[str, int]:
    """The numbers of a file of lines that begin with a name and a number."""
    numbers = {}
    with suppress(ValueError):
        for line in text_of(file).splitlines():
            name, number, *_ = line.split()
            if number.isdecimal():
                numbers[name] = int(number)
    return numbers


def memory_of(pids: Iterable[int]) -> int:
    """The bytes of processes; what several processes share counts once."""
    return sum(map(_memory_of, pids))


def _memory_of(pid: int) -> int:
    fields = _numbers(Path(f"/proc/{pid}/smaps_rollup"))
    kibibytes = fields.get("Pss:", 0) + fields.get("SwapPss:", 0)
    return kibibytes << 10


# --------------------------------------------------------------------------------------------------------------------
# Free ports, and retries for when another process takes one first.

ADDRESS_IN_USE = "Address already in use"
CONNECT_TIMEOUT = "connect() timed out."
TRIES = 10

# A generator of its own, so that waiting does not change the test's random numbers.
_jitter = random.Random()
# The sockets of this process.
_leases: set[socket.socket] = set()


def find_free_port() -> int:
    """Return a port that is free now. Nothing keeps it free: pair this with `retry_on_connect_failures`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def leased_port() -> Iterator[int]:
    """A port that no other process is given while the `with` lasts, but that a server may listen on.

    A socket that is bound and does not listen keeps it: the system gives the port to nobody who asks for any port, and
    lets a server bind it that sets SO_REUSEADDR, as all of torch's do.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as lease:
        lease.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        lease.bind(("", 0))
        _leases.add(lease)
        try:
            yield lease.getsockname()[1]
        finally:
            _leases.discard(lease)


def forget_leases() -> None:
    """In a forked child that lives longer than the leases of its parent: leave them to it."""
    for lease in _leases:
        lease.close()
    _leases.clear()


def retry_on_connect_failures(
    func: Callable[..., Any] | None = None, connect_errors: str | Iterable[str] = (ADDRESS_IN_USE,)
) -> Any:
    """Retry a test, up to 10 runs in all, after a RuntimeError whose message contains one of the texts."""
    if func is None:
        return functools.partial(retry_on_connect_failures, connect_errors=connect_errors)
    texts = (connect_errors,) if isinstance(connect_errors, str) else tuple(connect_errors)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for left in reversed(range(TRIES)):
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                # A TCPStore on libuv writes "address already in use", the older one "Address already in use".
                if not any(text.lower() in str(error).lower() for text in texts):
                    raise
                if not left:
                    raise RuntimeError(f"Failing after {TRIES} retries with error: {error}") from error
            time.sleep(_jitter.random())
        raise AssertionError

    return wrapper
