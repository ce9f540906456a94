"""The use of this machine's memory, in all and by process."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.words import size_in_words


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
