"""Devices and slots to lease, the unit that starts next, and what it leases.

Pure: no process, no clock.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch_testing_ext._machine.device_rules import (
    RANKS_PER_GPU,
    DeviceFacts,
    bare_uuid,
    by_uuid,
    facts_of_chosen,
    groups_that_meet,
    identity_of_device,
    masks_for,
    shared_backend,
    visible_names,
    why_too_many,
)
from torch_testing_ext._machine.nvml import Gpu, nvlinks
from torch_testing_ext._process.words import nearest
from torch_testing_ext.runner.model import Lease, NodeOfRun, Unit
from torch_testing_ext.runner.options import Gpus, Options, UsageError

# --------------------------------------------------------------------------------------------------------------------
# The accelerators that a run may lease, and the environment that restricts a process to its lease. Pure.

# The same as in launch/environment.py, which is slow to import.
FAKE_DEVICES = "TORCH_TESTING_EXT_FAKE_DEVICES"


@dataclass(frozen=True)
class Inventory:
    """The accelerators that a run may lease."""

    names: tuple[str, ...] = ()
    # "cuda", "hip", "xpu", or the name of another type of torch; None without accelerators.
    kind: str | None = None
    fake: bool = False
    # What tells a device from all others, by name.
    identities: Mapping[str, str] = field(default_factory=dict)
    # Of a cluster, whose devices have their node in their name.
    nodes: tuple[NodeOfRun, ...] = ()
    # Of each device; empty if they are not known.
    facts: tuple[DeviceFacts, ...] = ()
    ranks_per_device: int = 1
    # Of ranks that share devices.
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
    if options.planned_devices is not None:
        names = tuple(map(str, range(options.planned_devices)))
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


# --------------------------------------------------------------------------------------------------------------------
# Hands out devices and CPU slots to units. Nothing is handed out twice at the same time. Knows no file.


def slots_of(unit: Unit, slots: int) -> int:
    """The number of a node's CPU slots that a unit waits for: one per process, at most all; none if they use devices.

    Ranks on devices wait for none, and leave fewer to the others.
    """
    if unit.devices:
        return 0
    return min(unit.processes, slots)


class Size(NamedTuple):
    """The number of devices or slots of the largest machine of a run, and of all."""

    largest: int
    total: int


@dataclass(eq=False)
class Leases:
    """The devices and CPU slots of a machine, and which of them are leased."""

    # Of the devices.
    names: tuple[str, ...]
    number_of_slots: int
    # Of each device, if they are known.
    facts: Sequence[DeviceFacts] = ()
    # Of ranks that share devices.
    shared_backend: str = ""
    # Of a cluster.
    node: str = ""
    _held: list[Lease] = field(default_factory=list)
    # The ranks of each lease of devices, which use processors as well.
    _ranks_on_devices: list[tuple[Lease, int]] = field(default_factory=list)
    _quarantined: set[str] = field(default_factory=set)
    _withheld: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        are_unique = len(set(self.names)) == len(self.names)
        assert are_unique, f"two devices have the same name: {self.names}"

    def withhold(self, names: Iterable[str]) -> None:
        """Lease none of these devices, and any other again: other runs have them."""
        self._withheld = frozenset(names)

    def unheld(self) -> list[str]:
        """The devices that this run could lease, if no other run had them."""
        taken = set(self._quarantined)
        for lease in self._held:
            taken.update(lease.devices)
        return [name for name in self.names if name not in taken]

    @property
    def devices(self) -> Size:
        number = len(self.names)
        return Size(number, number)

    @property
    def slots(self) -> Size:
        return Size(self.number_of_slots, self.number_of_slots)

    @property
    def free_devices(self) -> int:
        return len(self._free())

    @property
    def free_slots(self) -> int:
        """Ranks on devices take slots as well, but one unit on the CPU, of any width, may always run beside them."""
        taken = sum(len(lease.slots) for lease in self._held)
        by_ranks_on_devices = sum(ranks for _, ranks in self._ranks_on_devices) if taken else 0
        return max(self.number_of_slots - by_ranks_on_devices - taken, 0)

    def take(self, unit: Unit) -> Lease:
        """Lease exactly what the unit needs, which must be free: the queue decides which unit fits."""
        devices = self._choose(self._free(), unit)
        assert devices is not None, f"unit {unit.number} needs {unit.devices} of {self.free_devices} devices"
        wanted_slots = slots_of(unit, self.number_of_slots)
        slots = self._lowest_free_slots(wanted_slots)
        lease = Lease(
            devices,
            slots,
            alone=unit.alone,
            shared_by=unit.shared_by,
            over=self.shared_backend if unit.shared_by else "",
            node=self.node,
        )
        assert len(devices) == unit.devices, f"unit {unit.number} needs {unit.devices}, not {devices}"
        assert len(slots) == wanted_slots, f"unit {unit.number} does not fit into {slots}"
        self._held.append(lease)
        if devices:
            self._ranks_on_devices.append((lease, unit.processes))
        self._check()
        return lease

    def _lowest_free_slots(self, count: int) -> tuple[int, ...]:
        taken: set[int] = set()
        for lease in self._held:
            taken.update(lease.slots)
        free = [slot for slot in range(self.number_of_slots) if slot not in taken]
        return tuple(free[:count])

    def _free(self) -> list[str]:
        return [name for name in self.unheld() if name not in self._withheld]

    def _choose(self, free: Sequence[str], unit: Unit) -> tuple[str, ...] | None:
        """Choose devices that satisfy the unit; None if too few are free."""
        count = unit.devices
        if len(free) < count:
            return None
        if not unit.of_devices or not self.facts:
            return tuple(free[:count])
        free_numbers = [self.names.index(name) for name in free]
        # The first of them: there may be many.
        numbers = next(groups_that_meet(self.facts, unit.of_devices, count, free_numbers), None)
        return None if numbers is None else tuple(self.names[number] for number in numbers)

    def quarantine(self, name: str) -> None:
        """Never lease a device again in this run."""
        self._quarantined.add(name)

    def may_fit(self, unit: Unit) -> bool:
        """Whether there are devices that the unit can get when others have ended."""
        if not self._quarantined or not unit.devices:
            return True
        left = [name for name in self.names if name not in self._quarantined]
        chosen = self._choose(left, unit)
        return chosen is not None

    def fits(self, unit: Unit) -> bool:
        """Whether the free resources, which are enough, have what the unit needs, in one place."""
        if not unit.of_devices:
            return True
        chosen = self._choose(self._free(), unit)
        return chosen is not None

    def reserve(self, unit: Unit) -> bool:
        """Other units wait until this one fits: no part of this machine is kept for it."""
        return False

    def may_run_now(self, unit: Unit) -> bool:
        """Whether neither the unit nor one of those that run has to be alone."""
        if not self._held:
            return True
        if unit.alone:
            return False
        return not any(lease.alone for lease in self._held)

    def holds(self, lease: Lease) -> bool:
        return any(other is lease for other in self._held)

    def give_back(self, lease: Lease) -> None:
        """Frees a lease. Call it when every process of the unit is gone."""
        assert self.holds(lease), f"{lease} is not held"
        self._held = [other for other in self._held if other is not lease]
        self._ranks_on_devices = [(other, ranks) for other, ranks in self._ranks_on_devices if other is not lease]

    def _check(self) -> None:
        devices: list[str] = []
        slots: list[int] = []
        for lease in self._held:
            devices += lease.devices
            slots += lease.slots
        assert len(set(devices)) == len(devices), f"two leases overlap in devices: {self._held}"
        assert len(set(slots)) == len(slots), f"two leases overlap in slots: {self._held}"


# --------------------------------------------------------------------------------------------------------------------
# Leases on several nodes: one set of leases for each node, and the choice of the node for a unit. Pure.
#
# A unit runs on one node. It gets the node that it leaves the least free room on, so that wide units find nodes that
# are free as a whole; among equal ones, a node that has the unit's file open already.


class NodeLeases:
    """The devices and CPU slots of all nodes, and which of them are leased."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        # A node, and the number of the unit that it is kept for.
        self._reserved: dict[str, int] = {}

    # -- nodes

    def add(self, name: str, devices: tuple[str, ...], slots: int) -> None:
        leases = Leases(devices, slots, node=name)
        self._nodes[name] = _Node(leases)

    def drop(self, name: str) -> None:
        """A node is lost: what was leased there is nothing any more."""
        self._nodes.pop(name, None)
        self._reserved.pop(name, None)

    def drain(self, name: str) -> None:
        """A node gets no further units, and is dropped when its units have ended or it is lost."""
        if name in self._nodes:
            self._nodes[name].draining = True
            self._reserved.pop(name, None)

    def _usable(self) -> dict[str, _Node]:
        usable = {}
        for name, node in self._nodes.items():
            if not node.draining:
                usable[name] = node
        return usable

    # -- what the engine and the queue ask

    @property
    def devices(self) -> Size:
        totals = [node.leases.devices.total for node in self._usable().values()]
        return _size(totals)

    @property
    def slots(self) -> Size:
        totals = [node.leases.slots.total for node in self._usable().values()]
        return _size(totals)

    @property
    def free_devices(self) -> int:
        """The most devices that are free on one node."""
        numbers = [node.leases.free_devices for node in self._usable().values()]
        return max(numbers, default=0)

    @property
    def free_slots(self) -> int:
        """The most CPU slots that are free on one node."""
        numbers = [node.leases.free_slots for node in self._usable().values()]
        return max(numbers, default=0)

    def may_run_now(self, unit: Unit) -> bool:
        nodes = self._usable().values()
        return any(node.leases.may_run_now(unit) for node in nodes)

    def fits(self, unit: Unit) -> bool:
        """Whether there is room for the unit on a node now."""
        return self._choose(unit) is not None

    def may_fit(self, unit: Unit) -> bool:
        """Whether a node is large enough for the unit."""
        width = self._width(unit)
        sizes = [node.size(unit) for node in self._usable().values()]
        return any(size >= width for size in sizes)

    def reserve(self, unit: Unit) -> bool:
        """Keep other units off a node that suits this one, until it fits there: off that with most room already."""
        if unit.number in self._reserved.values():
            return True
        if len(self._nodes) < 2:
            return False
        width = self._width(unit)
        suitable = []
        for name, node in self._usable().items():
            if node.size(unit) >= width:
                suitable.append((node.free(unit), name))
        if not suitable:
            return False
        _, name = max(suitable)
        self._reserved = {name: unit.number}
        return True

    def take(self, unit: Unit) -> Lease:
        """Leases exactly what the unit needs on the node that suits it best, which must have room."""
        name = self._choose(unit)
        assert name is not None, f"unit {unit.number} fits on no node"
        if unit.number in self._reserved.values():
            self._reserved = {}
        node = self._nodes[name]
        node.files.add(unit.file)
        return node.leases.take(unit)

    def give_back(self, lease: Lease) -> None:
        """Frees a lease. That of a node which is lost is gone already."""
        node = self._nodes.get(lease.node)
        if node is not None and node.leases.holds(lease):
            node.leases.give_back(lease)

    def _width(self, unit: Unit) -> int:
        return unit.devices or slots_of(unit, self.slots.largest)

    def _choose(self, unit: Unit) -> str | None:
        """The node with room for the unit that it leaves the least of; of equal ones, one that has its file open."""
        width = self._width(unit)
        suitable = {}
        for name, node in self._usable().items():
            is_for_others = self._reserved.get(name, unit.number) != unit.number
            left = node.free(unit) - width
            if left >= 0 and not is_for_others and node.leases.may_run_now(unit):
                suitable[name] = (left, unit.file not in node.files)
        return min(suitable, key=suitable.__getitem__, default=None)


# The resources of a run, of which it leases some to each unit: those of this machine, or of a cluster's nodes.
RunLeases: TypeAlias = Leases | NodeLeases


def _size(numbers: list[int]) -> Size:
    return Size(max(numbers, default=0), sum(numbers))


@dataclass
class _Node:
    """The leases of one node, and which files are open there."""

    leases: Leases
    files: set[str] = field(default_factory=set)
    draining: bool = False

    def size(self, unit: Unit) -> int:
        if unit.devices:
            return self.leases.devices.total
        return self.leases.slots.total

    def free(self, unit: Unit) -> int:
        if unit.devices:
            return self.leases.free_devices
        return self.leases.free_slots


# --------------------------------------------------------------------------------------------------------------------
# Decides which unit starts next: a pure policy over waiting units and free resources. No clock, no process.
#
# Units that use devices compete only for devices, the others only for CPU slots: two queues that never wait for each
# other. In a queue the widest unit starts first, and among equally wide units the longest: narrow units then fill the
# gaps that wide ones leave. Exception: a unit starts before all others if it takes as long as all of them on the
# whole machine. A unit that does not fit into the free resources, or that later arrivals push back, can be overtaken
# only a limited number of times, so no unit starves.

# How often a waiting unit can be overtaken, per device or slot of the machine: rarely enough that it starts soon, often
# enough that free resources are not idle meanwhile.
MOST_OVERTAKEN = 2
# A sum that is kept up to date collects rounding errors.
_ROUNDING = 0.999
# Seconds; used if the duration of no unit is known, so that all units are equal.
UNKNOWN = 1.0

Priority = Callable[[Unit], Any]


def no_preference(unit: Unit) -> int:
    """The priority if all units are equal."""
    return 0


class Queue:
    """The units that wait. Units with a smaller `priority` start before others regardless of size."""

    def __init__(self, units: Iterable[Unit], leases: RunLeases, priority: Priority = no_preference):
        units = tuple(units)
        typical = typical_seconds(units)
        on_devices = [unit for unit in units if unit.devices]
        on_slots = [unit for unit in units if not unit.devices]
        self._on_devices = _ResourceQueue(on_devices, lambda: leases.devices, priority, typical, leases)
        self._on_slots = _ResourceQueue(on_slots, lambda: leases.slots, priority, typical, leases)

    def __len__(self) -> int:
        return len(self._on_devices) + len(self._on_slots)

    @property
    def wants_devices(self) -> bool:
        """Whether a unit waits for devices."""
        return len(self._on_devices) > 0

    def add(self, unit: Unit) -> None:
        queue = self._on_devices if unit.devices else self._on_slots
        queue.add(unit)

    def take(self, free_devices: int, free_slots: int) -> Unit | None:
        """Removes and returns the unit to start now; None if another unit has to end first."""
        return self._on_devices.take(free_devices) or self._on_slots.take(free_slots)

    def drop(self, is_hopeless: Callable[[Unit], bool]) -> tuple[Unit, ...]:
        """Removes and returns the units that can never start."""
        return self._on_devices.drop(is_hopeless)

    def clear(self) -> tuple[Unit, ...]:
        """Removes and returns all waiting units."""
        return (*self._on_devices.clear(), *self._on_slots.clear())


def typical_seconds(units: Sequence[Unit]) -> float:
    """The median of the expected durations that are known."""
    known = [unit.seconds for unit in units if unit.seconds is not None]
    if not known:
        return UNKNOWN
    return statistics.median(known)


@dataclass
class _Waiting:
    """A unit that waits."""

    unit: Unit
    width: int
    seconds: float
    priority: Any
    overtaken: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.priority, -self.width, -self.seconds)

    @property
    def area(self) -> float:
        return self.width * self.seconds


class _ResourceQueue:
    """The units that wait for one resource, in the order in which they should start."""

    def __init__(
        self,
        units: list[Unit],
        size: Callable[[], Size],
        priority: Priority,
        typical: float,
        leases: RunLeases,
    ):
        """`size`: of the resource, which changes when nodes come or go."""
        self._find_size = size
        self._priority = priority
        self._typical = typical
        self._leases = leases
        self._size = size()
        # The widest unit that may be added: as wide as the largest node that has been there.
        self._widest = self._size.largest
        self._waiting = [self._to_waiting(unit) for unit in units]
        self._waiting.sort(key=lambda waiting: waiting.key)
        self._work = self._total_work()
        self._longest_ever = max((waiting.seconds for waiting in self._waiting), default=0.0)

    def _total_work(self) -> float:
        return sum(waiting.area for waiting in self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def _most_overtaken(self) -> int:
        return MOST_OVERTAKEN * self._size.total

    def _width(self, unit: Unit) -> int:
        return unit.devices or slots_of(unit, self._size.largest)

    def _resize(self) -> None:
        size = self._find_size()
        if size == self._size:
            return
        self._size = size
        self._widest = max(self._widest, size.largest)
        for waiting in self._waiting:
            waiting.width = self._width(waiting.unit)
        self._work = self._total_work()

    def add(self, unit: Unit) -> None:
        self._resize()
        arrival = self._to_waiting(unit)
        self._work += arrival.area
        self._longest_ever = max(self._longest_ever, arrival.seconds)
        self._insert(self._place_for(arrival), arrival)

    def _place_for(self, arrival: _Waiting) -> int:
        """The place by its key, but behind every unit that may not be overtaken again."""
        for place in range(len(self._waiting), 0, -1):
            before = self._waiting[place - 1]
            if arrival.key >= before.key or before.overtaken >= self._most_overtaken:
                return place
        return 0

    def take(self, free: int) -> Unit | None:
        """Removes and returns the unit to start now; None if another unit has to end first."""
        self._resize()
        if not self._waiting or not free:
            return None
        self._promote_longest()
        chosen = self._choose(free)
        if chosen is None:
            return None
        self._waiting = [waiting for waiting in self._waiting if waiting is not chosen]
        self._work = self._work - chosen.area if self._waiting else 0.0
        return chosen.unit

    def _choose(self, free: int) -> _Waiting | None:
        """The first unit that may start, if it fits, else one that fits and overtakes it."""
        ready = filter(self._may_start, self._waiting)
        first = next(ready, None)
        if first is None or self._fits(first, free):
            return first
        must_be_next = first.overtaken >= self._most_overtaken
        if must_be_next and not self._leases.reserve(first.unit):
            return None
        for waiting in ready:
            if self._fits(waiting, free):
                first.overtaken += 1
                return waiting
        return None

    def _may_start(self, waiting: _Waiting) -> bool:
        """A unit that may not run now waits for another to end, or for a larger node, and does not hold up the rest."""
        if not self._leases.may_run_now(waiting.unit):
            return False
        return self._leases.may_fit(waiting.unit)

    def _fits(self, waiting: _Waiting, free: int) -> bool:
        if waiting.width > free:
            return False
        return self._leases.fits(waiting.unit)

    def drop(self, is_hopeless: Callable[[Unit], bool]) -> tuple[Unit, ...]:
        dropped = []
        left = []
        for waiting in self._waiting:
            if is_hopeless(waiting.unit):
                dropped.append(waiting.unit)
            else:
                left.append(waiting)
        self._waiting = left
        self._work = self._total_work()
        return tuple(dropped)

    def clear(self) -> list[Unit]:
        units = [waiting.unit for waiting in self._waiting]
        self._waiting = []
        self._work = 0.0
        return units

    def _to_waiting(self, unit: Unit) -> _Waiting:
        width = self._width(unit)
        assert width <= self._widest, f"unit {unit.number} needs {width} of {self._widest}: it can never start"
        seconds = self._typical if unit.seconds is None else unit.seconds
        return _Waiting(unit, width, seconds, self._priority(unit))

    def _insert(self, place: int, arrival: _Waiting) -> None:
        for pushed_back in self._waiting[place:]:
            pushed_back.overtaken += 1
        self._waiting.insert(place, arrival)

    def _promote_longest(self) -> None:
        """Moves a unit to the front if it takes as long as all waiting units on the whole machine."""
        if self._longest_ever * self._size.total < self._work * _ROUNDING:
            # Without a look at each of thousands of short tests.
            return
        first = self._waiting[0]
        if first.overtaken >= self._most_overtaken:
            return
        equals = [waiting for waiting in self._waiting if waiting.priority == first.priority]
        longest = max(equals, key=lambda waiting: waiting.seconds)
        takes_as_long = longest.seconds * self._size.total >= self._total_work()
        if longest is not first and takes_as_long:
            self._waiting.remove(longest)
            self._insert(0, longest)
