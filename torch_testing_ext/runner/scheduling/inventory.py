"""Which accelerators a run may lease, and how to restrict a process to its lease. Pure: torch is asked elsewhere.

An inherited mask is respected: devices have the names that it gives them (numbers, UUIDs, MIG instances), and a lease
is written to the same variable. The driver decides how many entries of a mask count: it stops reading at the first
unknown entry, and shows no device if one is named twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..model import Lease
from ..options.options import Gpus, Options, UsageError
from ..options.suggestions import nearest

FAKE_DEVICES = "TORCH_TESTING_EXT_FAKE_DEVICES"  # the same as in launch/settings.py, which is slow to import
NONE = "-1"  # an empty mask hides everything from CUDA, nothing from HIP: no device has this number
# By kind of accelerator: the variables that mask it, the one that takes precedence first.
MASKS = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),  # these number the devices that ROCR_VISIBLE_DEVICES leaves
    "xpu": ("ZE_AFFINITY_MASK",),
}


@dataclass(frozen=True)
class Inventory:
    """The accelerators that a run may lease."""

    names: tuple[str, ...] = ()
    kind: str | None = None  # a key of MASKS; None without accelerators
    fake: bool = False
    identities: Mapping[str, str] = field(default_factory=dict)  # what tells a device from all others, by name

    def identity_of(self, name: str) -> str:
        """What identifies a device on this machine: its UUID if it is known, else its kind and its number."""
        return f"{'fake' if self.fake else self.kind}-{self.identities.get(name, name)}"

    @property
    def most_at_once(self) -> int:
        """How many of them one process can use. CUDA shows a process at most one MIG instance of those in its mask."""
        return min(len(self.names), 1) if any(map(_is_mig, self.names)) else len(self.names)


def make_inventory(
    options: Options, environ: Mapping[str, str], kind: str | None, count: int, uuids: Sequence[str] = ()
) -> Inventory:
    """`kind`, `count` and `uuids` are what a process with this environment sees; no UUIDs if they are not known.

    Raises UsageError if --gpus names devices that are not visible.
    """
    if options.fake_gpus is not None:
        return Inventory(tuple(map(str, range(options.fake_gpus))), kind, fake=True)
    if kind is None or not count:
        return _chosen(options.gpus, Inventory())
    if kind not in MASKS and count > 1:
        raise UsageError(
            f"no environment variable is known that restricts a process to some of the {count} {kind} devices; "
            "use --gpus 0"
        )
    names = _visible(_inherited(environ, kind), kind, count)
    known = len(names) == len(uuids) == len(set(uuids)) and not any(map(_is_mig, names))
    identities = dict(zip(names, uuids, strict=True)) if known else {}
    return _chosen(options.gpus, Inventory(names, kind, identities=identities))


def _chosen(gpus: Gpus, inventory: Inventory) -> Inventory:
    names = inventory.names
    if isinstance(gpus, int):
        if gpus > len(names):
            raise UsageError(f"--gpus {gpus}: only {len(names)} visible{_named(names)}")
        names = names[:gpus]
    elif gpus is not None:
        for name in gpus:
            if name not in names:
                raise UsageError(f"--gpus: {name} is not visible{_named(names)}.{nearest(name, names)}")
        names = gpus
    return Inventory(names, inventory.kind, identities=inventory.identities)


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def _inherited(environ: Mapping[str, str], kind: str) -> str | None:
    return next((environ[name] for name in MASKS.get(kind, ()) if environ.get(name)), None)


def _visible(mask: str | None, kind: str, count: int) -> tuple[str, ...]:
    """The names of the devices that the mask leaves visible."""
    if mask is None:
        return tuple(map(str, range(count)))
    read = str.strip if kind == "xpu" else _as_cuda_reads  # in Level Zero, 0.1 is a part of a device
    entries = [read(entry) for entry in mask.split(",")]
    if _is_mig(entries[0]):
        return _mig_instances(entries)
    return tuple(entries[:count])


def _mig_instances(entries: Sequence[str]) -> tuple[str, ...]:
    """All MIG instances, of which a process would see one, up to the first entry that is none or a duplicate."""
    instances: list[str] = []
    for entry in entries:
        if not _is_mig(entry) or entry in instances:
            break
        instances.append(entry)
    return tuple(instances)


def _is_mig(name: str) -> bool:
    return name.startswith("MIG-")


def _as_cuda_reads(entry: str) -> str:
    """A number as C reads it: without leading blanks, a leading sign and trailing characters."""
    number = re.match(r"\s*\+?0*(\d+)", entry)
    return number[1] if number else entry.strip()


def environment_of(lease: Lease, inventory: Inventory) -> dict[str, str]:
    """The environment variables that make a process see exactly the devices of its lease."""
    if inventory.fake:
        hidden = {name: NONE for names in MASKS.values() for name in names} if inventory.kind else {}
        return {**hidden, FAKE_DEVICES: ",".join(lease.devices)}
    shown = ",".join(lease.devices) or NONE
    return dict.fromkeys(MASKS.get(inventory.kind or "", ()), shown)
