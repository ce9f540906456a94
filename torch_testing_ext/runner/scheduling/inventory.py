"""The accelerators that a run may lease, and the environment that restricts a process to its lease. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_testing_ext._machine.device_facts import DeviceFacts, renumbered
from torch_testing_ext._machine.nvml import Gpu
from torch_testing_ext._machine.sharing import RANKS_PER_GPU, shared_backend, why_too_many
from torch_testing_ext._machine.topology import gpus_by_name, nvlinks
from torch_testing_ext._machine.visible_devices import (
    MASKS,
    NONE,
    bare_uuid,
    by_uuid,
    identity,
    is_mig,
    masks_for,
    visible_names,
)

from ..model import Lease, NodeOfRun
from ..options.options import Gpus, Options, UsageError, nearest

FAKE_DEVICES = "TORCH_TESTING_EXT_FAKE_DEVICES"  # the same as in launch/settings.py, which is slow to import


@dataclass(frozen=True)
class Inventory:
    """The accelerators that a run may lease."""

    names: tuple[str, ...] = ()
    kind: str | None = None  # a key of MASKS; None without accelerators
    fake: bool = False
    identities: Mapping[str, str] = field(default_factory=dict)  # what tells a device from all others, by name
    nodes: tuple[NodeOfRun, ...] = ()  # of a cluster, whose devices have their node in their name
    facts: tuple[DeviceFacts, ...] = ()  # of each device; empty if they are not known
    gpus: Mapping[str, Gpu] = field(default_factory=dict)  # what NVML knows, by name, as far as it does
    ranks_per_device: int = 1
    shared_backend: str = ""  # of ranks that share devices

    def identity_of(self, name: str) -> str:
        """The identity of a device on this machine: its UUID if it is known, else its kind and its number."""
        return identity("fake" if self.fake else self.kind, name, self.identities)

    @property
    def most_at_once(self) -> int:
        """The number of them that one process can use: with CUDA, at most one MIG instance of those in its mask."""
        if self.nodes:
            return max(node.most_at_once for node in self.nodes)
        return min(len(self.names), 1) if any(map(is_mig, self.names)) else len(self.names)

    @property
    def most_ranks(self) -> int:
        """The most ranks of one test that can use devices: several may share one, if the user wants that."""
        return self.most_at_once * self.ranks_per_device


def make_inventory(
    options: Options,
    environ: Mapping[str, str],
    kind: str | None,
    count: int,
    uuids: Sequence[str] = (),
    facts: Sequence[DeviceFacts] = (),
    nccl: tuple[int, ...] = (),
    mig: tuple[str, ...] = (),
) -> Inventory:
    """`kind`, `count`, `uuids` and `facts` are what a process with this environment sees, as far as it is known.

    `nccl`: the version of NCCL. `mig`: see `all_mig_instances`. Raises UsageError if --gpus names devices that are not
    visible, or if --ranks-per-gpu wants more ranks than a device can have.
    """
    if options.fake_gpus is not None:
        found = Inventory(tuple(map(str, range(options.fake_gpus))), kind, fake=True)
    elif kind is None or not count:
        found = _chosen(options.gpus, Inventory())
    elif kind not in MASKS and count > 1:
        raise UsageError(
            f"no environment variable is known that restricts a process to some of the {count} {kind} devices; "
            "use --gpus 0"
        )
    else:
        names = mig or visible_names(environ, kind, count)
        known = tuple(facts) if len(facts) == len(names) else ()
        found = _chosen(options.gpus, Inventory(names, kind, identities=by_uuid(names, uuids), facts=known))
    return _shared(options, found, nccl)


def _shared(options: Options, inventory: Inventory, nccl: tuple[int, ...]) -> Inventory:
    """With as many ranks on a device as --ranks-per-gpu says."""
    ranks = options.ranks_per_gpu
    if ranks == 1 or not inventory.names:
        return inventory
    if not inventory.fake and inventory.kind not in ("cuda", "hip"):
        raise UsageError(f"--ranks-per-gpu: gloo has no collectives for {inventory.kind} devices")
    for name, facts in zip(inventory.names, inventory.facts, strict=False):  # which may be unknown
        if facts.memory and (why := why_too_many(ranks, facts.memory, name)):
            raise UsageError(f"--ranks-per-gpu {ranks}: {why}")
    backend = shared_backend(nccl, inventory.kind == "hip")
    return dataclasses.replace(inventory, ranks_per_device=ranks, shared_backend=backend)


def _chosen(gpus: Gpus, inventory: Inventory) -> Inventory:
    names = inventory.names
    if isinstance(gpus, int):
        if gpus > len(names):
            raise UsageError(f"--gpus {gpus}: only {len(names)} visible{_named(names)}")
        names = names[:gpus]
    elif gpus is not None:
        names = tuple(_resolved(name, inventory) for name in gpus)
        if (double := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise UsageError(f"--gpus names device {double} twice")
    chosen = [inventory.names.index(name) for name in names]
    facts = renumbered(inventory.facts, chosen) if inventory.facts else ()
    return dataclasses.replace(inventory, names=names, facts=facts)


def _resolved(wanted: str, inventory: Inventory) -> str:
    """The name in this run of a device that --gpus names so, or by its UUID, which may be abbreviated."""
    names = inventory.names
    if wanted in names:
        return wanted
    matches = []
    if wanted.lower().startswith(("gpu-", "mig-")):
        matches = [name for name in names if _is_uuid_of(wanted, inventory.identities.get(name, name))]
    if len(matches) > 1:
        raise UsageError(f"--gpus: {wanted} may be any of the devices {', '.join(matches)}")
    if not matches:
        raise UsageError(f"--gpus: {wanted} is not visible{_named(names)}.{nearest(wanted, names)}")
    return matches[0]


def _is_uuid_of(wanted: str, uuid: str) -> bool:
    """Either may be abbreviated: a mask may be, too."""
    one, other = bare_uuid(wanted), bare_uuid(uuid)
    return bool(one) and (other.startswith(one) or (not uuid.isdecimal() and one.startswith(other)))


def with_gpus(inventory: Inventory, gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Inventory:
    """The inventory with what NVML knows about its devices."""
    found = gpus_by_name(inventory.names, inventory.identities, gpus, environ)
    links = nvlinks(inventory.names, found)
    facts = tuple(dataclasses.replace(one, nvlinks=at) for one, at in zip(inventory.facts, links, strict=False))
    return dataclasses.replace(inventory, gpus=found, facts=facts)


def all_mig_instances(environ: Mapping[str, str], kind: str | None, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """The instances that a run may lease where all GPUs are in MIG mode and no mask chooses some of them.

    CUDA itself shows a process the first one only.
    """
    if kind not in (None, "cuda") or "CUDA_VISIBLE_DEVICES" in environ or not all(gpu.mig for gpu in gpus):
        return ()
    return tuple(instance.uuid for gpu in gpus for instance in gpu.instances)


def notes_on_sharing(inventory: Inventory, nccl: tuple[int, ...]) -> list[str]:
    """Warnings for the user before ranks share devices."""
    if inventory.ranks_per_device == 1:
        return []
    version = ".".join(map(str, nccl)) or "of this torch"
    one = f"{inventory.ranks_per_device} ranks may share each GPU (--ranks-per-gpu)"
    if inventory.shared_backend == "gloo":
        return [f"{one}: they use gloo, as NCCL {version} does not allow that; tests of NCCL itself are skipped"]
    return [f"{one}: NCCL {version} allows that as an experiment, and may hang if they need too much of a GPU at once"]


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def environment_of(lease: Lease, inventory: Inventory) -> dict[str, str]:
    """The environment variables that make a process see exactly the devices of its lease."""
    # An empty value counts as not set: a test with a device for each rank has them as without the option.
    ranks = str(inventory.ranks_per_device) if lease.shared_by else ""
    sharing = {RANKS_PER_GPU: ranks} if inventory.ranks_per_device > 1 else {}
    if inventory.fake:
        hidden = {name: NONE for names in MASKS.values() for name in names} if inventory.kind else {}
        return {**hidden, **sharing, FAKE_DEVICES: ",".join(lease.devices)}
    return {**masks_for(lease.devices, inventory.kind), **sharing}
