"""The accelerators that a run may lease, and the environment that restricts a process to its lease."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_testing_ext._machine.device_needs import DeviceFacts, facts_of_chosen
from torch_testing_ext._machine.device_sharing import RANKS_PER_GPU, shared_backend, why_too_many
from torch_testing_ext._machine.nvml import Gpu, nvlinks
from torch_testing_ext._machine.visible_devices import bare_uuid, by_uuid, identity_of_device, masks_for, visible_names
from torch_testing_ext._process.setting_names import FAKE_DEVICES
from torch_testing_ext._process.words import nearest
from torch_testing_ext.launch.aspects.fake_accelerators import ACCELERATORS
from torch_testing_ext.runner.model import Lease, NodeOfRun
from torch_testing_ext.runner.options import Action, Gpus, Options, UsageError
from torch_testing_ext.runner.options.readers import write_gpus

# The same as in launch/environment.py, which is slow to import.


@dataclass(frozen=True)
class Inventory:
    """The accelerators that a run may lease."""

    names: tuple[str, ...] = ()
    # "cuda", "hip", "xpu", or the name of another type of torch; None without accelerators.
    kind: str | None = None
    fake: bool = False
    # What tells a device from all others, by name.
    identities: Mapping[str, str] = field(default_factory=dict)
    # The nodes of a cluster, whose devices have their node in their name.
    nodes: tuple[NodeOfRun, ...] = ()
    # The facts of each device; empty if they are not known.
    facts: tuple[DeviceFacts, ...] = ()
    ranks_per_device: int = 1
    # The backend of ranks that share devices.
    shared_backend: str = ""

    def identity_of(self, name: str) -> str:
        """The identity of a device on this machine: its UUID if it is known, else its kind and its number."""
        return identity_of_device("fake" if self.fake else self.kind, name, self.identities)

    @property
    def most_at_once(self) -> int:
        """The number of them that one process can use."""
        return max(node.most_at_once for node in self.nodes) if self.nodes else len(self.names)

    @property
    def most_ranks(self) -> int:
        """The most ranks of one test that can use devices: several may share one, if the user wants that."""
        return self.most_at_once * self.ranks_per_device


def planned_devices(options: Options) -> int | None:
    """The number of devices to plan with, whatever there are: a schedule needs their number alone."""
    return options.value(ACCELERATORS) if options.action is Action.DRY_RUN else None


def make_inventory(
    options: Options,
    environ: Mapping[str, str],
    kind: str | None,
    count: int,
    uuids: Sequence[str] = (),
    facts: Sequence[DeviceFacts] = (),
    nccl: tuple[int, ...] = (),
    backend: str = "",
) -> Inventory:
    """`kind`, `count`, `uuids` and `facts` are what a process with this environment sees, as far as it is known.

    `nccl`: the version of NCCL. `backend`: their own. Raises UsageError if --gpus names devices that are not visible,
    or if --ranks-per-gpu wants more ranks than a device can have.
    """
    planned = planned_devices(options)
    if planned is not None:
        names = tuple(map(str, range(planned)))
        inventory = _chosen(options.gpus, Inventory(names, kind, fake=True))
    elif kind is None or not count:
        inventory = _chosen(options.gpus, Inventory())
    else:
        names = visible_names(environ, kind, count)
        # Facts of other devices than these are of no use.
        known_facts = tuple(facts) if len(facts) == len(names) else ()
        visible = Inventory(names, kind, identities=by_uuid(names, uuids), facts=known_facts)
        inventory = _chosen(options.gpus, visible)
    return _shared(options, inventory, environ, nccl, backend)


def _shared(
    options: Options, inventory: Inventory, environ: Mapping[str, str], nccl: tuple[int, ...], backend: str
) -> Inventory:
    """With as many ranks on a device as --ranks-per-gpu says."""
    ranks = options.ranks_per_gpu
    if ranks == 1 or not inventory.names:
        return inventory
    if inventory.kind == "xpu" and not inventory.fake:
        raise UsageError(f"--ranks-per-gpu: gloo has no collectives for {inventory.kind} devices")
    # The facts of devices may be unknown.
    for name, facts in zip(inventory.names, inventory.facts, strict=False):
        if not facts.memory:
            continue
        why = why_too_many(ranks, facts.memory, name)
        if why:
            raise UsageError(f"--ranks-per-gpu {ranks}: {why}")
    if inventory.fake or inventory.kind in ("cuda", "hip"):
        backend = shared_backend(nccl, inventory.kind == "hip", environ)
    if not backend:
        raise UsageError(f"--ranks-per-gpu: torch knows no backend for {inventory.kind} devices")
    return dataclasses.replace(inventory, ranks_per_device=ranks, shared_backend=backend)


_NO_GPU = "torch sees no GPU on this machine. Leave the option out to run on the CPU"


def _chosen(gpus: Gpus, inventory: Inventory) -> Inventory:
    """The inventory with only the devices that --gpus chooses."""
    names = inventory.names
    if gpus and not names:
        raise UsageError(f"--gpus {write_gpus(gpus)}: {_NO_GPU}")
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
        facts = facts_of_chosen(facts, numbers)
    return dataclasses.replace(inventory, names=names, facts=facts)


def _resolved(wanted: str, inventory: Inventory) -> str:
    """The name in this run of a device that --gpus names so, or by its UUID, which may be abbreviated."""
    names = inventory.names
    if wanted in names:
        return wanted
    matches = []
    if wanted.lower().startswith("gpu-"):
        for name in names:
            uuid = inventory.identities.get(name, name)
            if _is_uuid_of(wanted, uuid):
                matches.append(name)
    if len(matches) > 1:
        raise UsageError(f"--gpus: {wanted} matches several devices: {', '.join(matches)}")
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


def with_nvlinks(inventory: Inventory, gpus: Mapping[str, Gpu]) -> Inventory:
    """The inventory with the devices that NVLink connects. `gpus`: what NVML knows of its devices, by name."""
    links_of_devices = nvlinks(inventory.names, gpus)
    facts = []
    for facts_of_device, links in zip(inventory.facts, links_of_devices, strict=False):
        facts.append(dataclasses.replace(facts_of_device, nvlinks=links))
    return dataclasses.replace(inventory, facts=tuple(facts))


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
    return {**masks_for((), inventory.kind), **sharing, FAKE_DEVICES: ",".join(lease.devices)}
