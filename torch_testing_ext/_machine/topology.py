"""The GPUs that belong together, by NVLink and by NUMA node. Pure, except for `with_nvlinks`, which asks NVML."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from .device_facts import DeviceFacts
from .nvml import ComputeMode, Gpu, GpuLink, NvmlError, NvmlProcess, open_nvml
from .visible_devices import bare_uuid

# Among more groups than these, the first devices are taken: eight of sixteen are 12,870.
_MOST_GROUPS = 20_000


def gpus_by_name(
    names: Iterable[str], identities: Mapping[str, str], gpus: Sequence[Gpu], environ: Mapping[str, str]
) -> dict[str, Gpu]:
    """The GPU of each device, as far as it is known: by UUID, which may be abbreviated; a MIG instance's whole GPU.

    CUDA's numbers are NVML's only with CUDA_DEVICE_ORDER=PCI_BUS_ID, and without a mask.
    """
    in_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    by_name = {}
    for name in names:
        matches = matching(identities.get(name, name), gpus)
        is_number = name.isdecimal() and name not in identities
        if len(matches) == 1:
            by_name[name] = matches[0]
        elif in_order and is_number and int(name) < len(gpus):
            by_name[name] = gpus[int(name)]
    return by_name


def matching(uuid: str, gpus: Iterable[Gpu]) -> list[Gpu]:
    """The GPUs with this UUID or one that begins so, and those that have such an instance."""
    wanted = _core(uuid)
    if not wanted or uuid.isdecimal():
        return []
    matches = []
    for gpu in gpus:
        uuids = [gpu.uuid]
        uuids += [instance.uuid for instance in gpu.instances]
        if any(_core(own).startswith(wanted) for own in uuids):
            matches.append(gpu)
    return matches


def _core(uuid: str) -> str:
    """The older names of MIG instances hold their GPU's: MIG-GPU-.../1/0."""
    core, _, _ = bare_uuid(uuid).partition("/")
    return core


def preferred(free: Sequence[str], count: int, gpus: Mapping[str, Gpu]) -> tuple[str, ...]:
    """The `count` devices that work best together, of those that are free; the first ones if nothing is known."""
    groups = itertools.combinations(free, count)
    return tuple(best(groups, free, count, gpus) or free[:count])


def best(
    groups: Iterable[tuple[str, ...]], free: Sequence[str], count: int, gpus: Mapping[str, Gpu]
) -> tuple[str, ...] | None:
    """The best of these groups of free devices; the first one if nothing is known. None if there is no group."""
    groups = iter(groups)
    first = next(groups, None)
    are_known = all(name in gpus for name in free)
    are_few = math.comb(len(free), count) <= _MOST_GROUPS
    if first is None or count < 2 or not are_known or not are_few:
        return first

    def cost(group: tuple[str, ...]) -> tuple[float, ...]:
        return _cost(group, free, gpus)

    return min(itertools.chain([first], groups), key=cost)


def _cost(group: Sequence[str], free: Sequence[str], gpus: Mapping[str, Gpu]) -> tuple[float, ...]:
    """First NVLink among all, then few NUMA nodes, then short ways; then what leaves the other devices together."""
    members = [gpus[name] for name in group]
    rest = [gpus[name] for name in free if name not in group]
    links = 0
    distance = 0
    for first, second in itertools.combinations(members, 2):
        link = _link(first, second)
        links += link.nvlink
        distance += link.distance
    links_to_rest = 0
    for member, other in itertools.product(members, rest):
        links_to_rest += _link(member, other).nvlink
    numa_nodes = {gpu.numa_node for gpu in members}
    near_in_rest = sum(gpu.numa_node in numa_nodes for gpu in rest)
    return (-links, len(numa_nodes), distance, links_to_rest, near_in_rest)


def _link(gpu: Gpu, other: Gpu) -> GpuLink:
    """The connection of two GPUs; the longest one if it is not known."""
    return other.links.get(gpu.uuid, GpuLink())


def nvlinks(names: Sequence[str], gpus: Mapping[str, Gpu]) -> list[tuple[int, ...] | None]:
    """For each device, the numbers of those that NVLink connects it to; None if it is not known."""
    known = {number: gpus[name] for number, name in enumerate(names) if name in gpus}
    links: list[tuple[int, ...] | None] = []
    for name in names:
        gpu = gpus.get(name)
        if gpu is None:
            links.append(None)
        else:
            linked = [number for number, other in known.items() if _link(gpu, other).nvlink]
            links.append(tuple(linked))
    return links


def with_nvlinks(
    facts: Sequence[DeviceFacts], uuids: Sequence[str], open_it: Callable[[], NvmlProcess] = open_nvml
) -> tuple[DeviceFacts, ...]:
    """The facts with the numbers of the devices that NVLink connects each to; as they are, where NVML does not say.

    `uuids`: of each device, as torch gives them, without the prefix that NVML's have.
    """
    if len(uuids) != len(facts) or len(facts) < 2:
        return tuple(facts)
    try:
        with closing(open_it()) as nvml:
            gpus = nvml.gpus()
    except NvmlError:
        return tuple(facts)
    linked = nvlinks(uuids, gpus_by_name(uuids, {}, gpus, {}))
    return tuple(replace(device, nvlinks=numbers) for device, numbers in zip(facts, linked, strict=True))


_EFFECTS = {
    ComputeMode.EXCLUSIVE_PROCESS: "only one process at a time can use it, and tests with several ranks on it fail",
    ComputeMode.PROHIBITED: "no process can use it",
}


def warnings_of(gpus: Mapping[str, Gpu]) -> list[str]:
    """Warnings about the devices of a run, by name."""
    warnings = []
    for mode, effect in _EFFECTS.items():
        names = [name for name, gpu in gpus.items() if gpu.compute_mode is mode]
        if names:
            noun = "devices" if len(names) > 1 else "device"
            devices = f"{noun} {', '.join(names)}"
            remedy = "nvidia-smi -c DEFAULT changes it"
            warnings.append(f"the compute mode of {devices} is {mode.value}: {effect} ({remedy})")
    return warnings
