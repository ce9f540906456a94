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

# The same as in launch/settings.py, which is slow to import.
FAKE_DEVICES = "TORCH_TESTING_EXT_FAKE_DEVICES"


@dataclass(frozen=True)
class Inventory:
    """The accelerators that a run may lease."""

    names: tuple[str, ...] = ()
    # A key of MASKS; None without accelerators.
    kind: str | None = None
    fake: bool = False
    # What tells a device from all others, by name.
    identities: Mapping[str, str] = field(default_factory=dict)
    # Of a cluster, whose devices have their node in their name.
    nodes: tuple[NodeOfRun, ...] = ()
    # Of each device; empty if they are not known.
    facts: tuple[DeviceFacts, ...] = ()
    # What NVML knows, by name, as far as it does.
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    ranks_per_device: int = 1
    # Of ranks that share devices.
    shared_backend: str = ""

    def identity_of(self, name: str) -> str:
        """The identity of a device on this machine: its UUID if it is known, else its kind and its number."""
        return identity("fake" if self.fake else self.kind, name, self.identities)

    @property
    def most_at_once(self) -> int:
        """The number of them that one process can use: with CUDA, at most one MIG instance of those in its mask."""
        if self.nodes:
            return max(node.most_at_once for node in self.nodes)
        if any(is_mig(name) for name in self.names):
            return 1
        return len(self.names)

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
        names = tuple(str(number) for number in range(options.fake_gpus))
        inventory = Inventory(names, kind, fake=True)
    elif kind is None or not count:
        inventory = _chosen(options.gpus, Inventory())
    elif kind not in MASKS and count > 1:
        raise UsageError(
            f"no environment variable is known that restricts a process to some of the {count} {kind} devices; "
            "use --gpus 0"
        )
    else:
        names = mig or visible_names(environ, kind, count)
        # Facts of other devices than these are of no use.
        known_facts = tuple(facts) if len(facts) == len(names) else ()
        visible = Inventory(names, kind, identities=by_uuid(names, uuids), facts=known_facts)
        inventory = _chosen(options.gpus, visible)
    return _shared(options, inventory, nccl)


def _shared(options: Options, inventory: Inventory, nccl: tuple[int, ...]) -> Inventory:
    """With as many ranks on a device as --ranks-per-gpu says."""
    ranks = options.ranks_per_gpu
    if ranks == 1 or not inventory.names:
        return inventory
    if not inventory.fake and inventory.kind not in ("cuda", "hip"):
        raise UsageError(f"--ranks-per-gpu: gloo has no collectives for {inventory.kind} devices")
    # The facts of devices may be unknown.
    for name, facts in zip(inventory.names, inventory.facts, strict=False):
        if not facts.memory:
            continue
        why = why_too_many(ranks, facts.memory, name)
        if why:
            raise UsageError(f"--ranks-per-gpu {ranks}: {why}")
    backend = shared_backend(nccl, inventory.kind == "hip")
    return dataclasses.replace(inventory, ranks_per_device=ranks, shared_backend=backend)


def _chosen(gpus: Gpus, inventory: Inventory) -> Inventory:
    """The inventory with only the devices that --gpus chooses."""
    names = inventory.names
    if isinstance(gpus, int):
        if gpus > len(names):
            raise UsageError(f"--gpus {gpus}: only {len(names)} visible{_named(names)}")
        names = names[:gpus]
    elif gpus is not None:
        names = tuple(_resolved(name, inventory) for name in gpus)
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"--gpus names device {name} twice")
    facts = inventory.facts
    if facts:
        numbers = [inventory.names.index(name) for name in names]
        facts = renumbered(facts, numbers)
    return dataclasses.replace(inventory, names=names, facts=facts)


def _resolved(wanted: str, inventory: Inventory) -> str:
    """The name in this run of a device that --gpus names so, or by its UUID, which may be abbreviated."""
    names = inventory.names
    if wanted in names:
        return wanted
    matches = []
    if wanted.lower().startswith(("gpu-", "mig-")):
        for name in names:
            uuid = inventory.identities.get(name, name)
            if _is_uuid_of(wanted, uuid):
                matches.append(name)
    if len(matches) > 1:
        raise UsageError(f"--gpus: {wanted} may be any of the devices {', '.join(matches)}")
    if not matches:
        raise UsageError(f"--gpus: {wanted} is not visible{_named(names)}.{nearest(wanted, names)}")
    return matches[0]


def _is_uuid_of(wanted: str, uuid: str) -> bool:
    """Either may be abbreviated: a mask may be, too."""
    bare_wanted = bare_uuid(wanted)
    bare = bare_uuid(uuid)
    if not bare_wanted:
        return False
    if bare.startswith(bare_wanted):
        return True
    is_number = uuid.isdecimal()
    return not is_number and bare_wanted.startswith(bare)


def with_gpus(
    inventory: Inventory,
    gpus: Sequence[Gpu],
    environ: Mapping[str, str],
) -> Inventory:
    """The inventory with what NVML knows about its devices."""
    by_name = gpus_by_name(inventory.names, inventory.identities, gpus, environ)
    links_of_devices = nvlinks(inventory.names, by_name)
    facts = []
    for facts_of_device, links in zip(inventory.facts, links_of_devices, strict=False):
        facts.append(dataclasses.replace(facts_of_device, nvlinks=links))
    return dataclasses.replace(inventory, gpus=by_name, facts=tuple(facts))


def all_mig_instances(
    environ: Mapping[str, str],
    kind: str | None,
    gpus: Sequence[Gpu],
) -> tuple[str, ...]:
    """The instances that a run may lease where all GPUs are in MIG mode and no mask chooses some of them.

    CUDA itself shows a process the first one only.
    """
    if kind not in (None, "cuda") or "CUDA_VISIBLE_DEVICES" in environ:
        return ()
    uuids = []
    for gpu in gpus:
        if not gpu.mig:
            return ()
        uuids += [instance.uuid for instance in gpu.instances]
    return tuple(uuids)


def notes_on_sharing(inventory: Inventory, nccl: tuple[int, ...]) -> list[str]:
    """Warnings for the user before ranks share devices."""
    if inventory.ranks_per_device == 1:
        return []
    version = ".".join(str(number) for number in nccl) or "of this torch"
    if inventory.shared_backend == "gloo":
        consequence = f"they use gloo, as NCCL {version} does not allow that; tests of NCCL itself are skipped"
    else:
        consequence = (
            f"NCCL {version} allows that as an experiment, and may hang if they need too much of a GPU at once"
        )
    return [f"{inventory.ranks_per_device} ranks may share each GPU (--ranks-per-gpu): {consequence}"]


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def environment_of(lease: Lease, inventory: Inventory) -> dict[str, str]:
    """The environment variables that make a process see exactly the devices of its lease."""
    sharing = {}
    if inventory.ranks_per_device > 1:
        # An empty value counts as not set: a test with a device for each rank has them as without the option.
        sharing[RANKS_PER_GPU] = str(inventory.ranks_per_device) if lease.shared_by else ""
    if not inventory.fake:
        return {**masks_for(lease.devices, inventory.kind), **sharing}
    hidden = {}
    if inventory.kind:
        for names in MASKS.values():
            hidden.update(dict.fromkeys(names, NONE))
    return {**hidden, **sharing, FAKE_DEVICES: ",".join(lease.devices)}
