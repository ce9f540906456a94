"""Which accelerators a run may lease, and how to restrict a process to its lease. Pure: torch is asked elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_testing_ext._machine.visible_devices import (
    MASKS,
    NONE,
    by_uuid,
    identity,
    is_mig,
    masks_for,
    visible_names,
)

from ..model import Lease, NodeOfRun
from ..options.options import Gpus, Options, UsageError
from ..options.suggestions import nearest

FAKE_DEVICES = "TORCH_TESTING_EXT_FAKE_DEVICES"  # the same as in launch/settings.py, which is slow to import


@dataclass(frozen=True)
class Inventory:
    """The accelerators that a run may lease."""

    names: tuple[str, ...] = ()
    kind: str | None = None  # a key of MASKS; None without accelerators
    fake: bool = False
    identities: Mapping[str, str] = field(default_factory=dict)  # what tells a device from all others, by name
    nodes: tuple[NodeOfRun, ...] = ()  # of a cluster, whose devices have their node in their name

    def identity_of(self, name: str) -> str:
        """What identifies a device on this machine: its UUID if it is known, else its kind and its number."""
        return identity("fake" if self.fake else self.kind, name, self.identities)

    @property
    def most_at_once(self) -> int:
        """How many of them one process can use. CUDA shows a process at most one MIG instance of those in its mask."""
        if self.nodes:
            return max(node.most_at_once for node in self.nodes)
        return min(len(self.names), 1) if any(map(is_mig, self.names)) else len(self.names)

    @property
    def most_together(self) -> int:
        """How many of them the ranks of one test can use, on all nodes."""
        return sum(node.most_at_once for node in self.nodes)


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
    names = visible_names(environ, kind, count)
    return _chosen(options.gpus, Inventory(names, kind, identities=by_uuid(names, uuids)))


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


def environment_of(lease: Lease, inventory: Inventory) -> dict[str, str]:
    """The environment variables that make a process see exactly the devices of its lease."""
    if inventory.fake:
        hidden = {name: NONE for names in MASKS.values() for name in names} if inventory.kind else {}
        return {**hidden, FAKE_DEVICES: ",".join(lease.devices)}
    return masks_for(lease.devices, inventory.kind)
