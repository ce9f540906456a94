"""Which accelerators a run may lease, and how a process is told which it has. Pure: torch is asked elsewhere.

A mask that the run inherits is kept: devices bear the names it gives them (numbers, UUIDs, MIG instances), and a lease
is written into the same variable. How many of its entries count is what the driver says, which stops reading at the
first entry it does not know, and shows nothing if one is named twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..model import Lease
from ..options.options import Gpus, Options, UsageError
from ..options.suggestions import nearest

FAKE_DEVICES = "TORCH_TESTING_EXT_FAKE_DEVICES"  # launch/settings.py knows it too, and is slow to import
NONE = "-1"  # an empty mask hides everything from CUDA, nothing from HIP: no device has this number
# By kind of accelerator the variables that mask it, the one that is obeyed first.
MASKS = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),  # ROCR_VISIBLE_DEVICES stands before: these number its rest
    "xpu": ("ZE_AFFINITY_MASK",),
}


@dataclass(frozen=True)
class Inventory:
    names: tuple[str, ...] = ()
    kind: str | None = None  # as in MASKS; None without accelerators
    fake: bool = False

    @property
    def most_at_once(self) -> int:
        """What one process can have of them. CUDA shows a process one MIG instance, however many its mask names."""
        return min(len(self.names), 1) if any(map(_is_mig, self.names)) else len(self.names)


def inventory(options: Options, environ: Mapping[str, str], kind: str | None, count: int) -> Inventory:
    """`kind` and `count` are what a process sees that inherits `environ`. Raises UsageError for --gpus it has not."""
    if options.fake_gpus is not None:
        return Inventory(tuple(map(str, range(options.fake_gpus))), kind, fake=True)
    if kind is None or not count:
        return _chosen(options.gpus, Inventory())
    if kind not in MASKS and count > 1:
        raise UsageError(f"no variable is known that shows a process some of {count} {kind} devices; use --gpus 0")
    return _chosen(options.gpus, Inventory(_visible(_inherited(environ, kind), kind, count), kind))


def _chosen(gpus: Gpus, there: Inventory) -> Inventory:
    names = there.names
    if isinstance(gpus, int):
        if gpus > len(names):
            raise UsageError(f"--gpus {gpus}: only {len(names)} are visible{_named(names)}")
        names = names[:gpus]
    elif gpus is not None:
        for name in gpus:
            if name not in names:
                raise UsageError(f"--gpus: {name} is not visible{_named(names)}.{nearest(name, names)}")
        names = gpus
    return Inventory(names, there.kind)


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def _inherited(environ: Mapping[str, str], kind: str) -> str | None:
    return next((environ[name] for name in MASKS.get(kind, ()) if environ.get(name)), None)


def _visible(mask: str | None, kind: str, count: int) -> tuple[str, ...]:
    """The names of the devices that are seen through the mask."""
    if mask is None:
        return tuple(map(str, range(count)))
    read = str.strip if kind == "xpu" else _as_cuda_reads  # 0.1 is a part of a device to Level Zero
    entries = [read(entry) for entry in mask.split(",")]
    if _is_mig(entries[0]):
        return _mig_instances(entries)
    return tuple(entries[:count])


def _mig_instances(entries: Sequence[str]) -> tuple[str, ...]:
    """All of them: a process would count one. Up to the first that is something else, or was named before."""
    instances: list[str] = []
    for entry in entries:
        if not _is_mig(entry) or entry in instances:
            break
        instances.append(entry)
    return tuple(instances)


def _is_mig(name: str) -> bool:
    return name.startswith("MIG-")


def _as_cuda_reads(entry: str) -> str:
    """A number as C reads it: blanks and a sign before it do not matter, nor what follows it."""
    number = re.match(r"\s*\+?0*(\d+)", entry)
    return number[1] if number else entry.strip()


def environment_of(lease: Lease, there: Inventory) -> dict[str, str]:
    """What to set in a process so that it sees its lease and nothing else."""
    if there.fake:
        hidden = {name: NONE for names in MASKS.values() for name in names} if there.kind else {}
        return {**hidden, FAKE_DEVICES: ",".join(lease.devices)}
    shown = ",".join(lease.devices) or NONE
    return dict.fromkeys(MASKS.get(there.kind or "", ()), shown)
