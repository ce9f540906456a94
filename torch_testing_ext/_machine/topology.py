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
    found = {}
    for name in names:
        matches = matching(identities.get(name, name), gpus)
        if len(matches) == 1:
            found[name] = matches[0]
        elif in_order and name not in identities and name.isdecimal() and int(name) < len(gpus):
            found[name] = gpus[int(name)]
    return found


def matching(uuid: str, gpus: Iterable[Gpu]) -> list[Gpu]:
    """The GPUs with this UUID or one that begins so, and those that have such an instance."""
    wanted = _core(uuid)
    if not wanted or uuid.isdecimal():
        return []
    return [
        gpu
        for gpu in gpus
        if any(_core(one).startswith(wanted) for one in (gpu.uuid, *(instance.uuid for instance in gpu.instances)))
    ]


def _core(uuid: str) -> str:
    """The older names of MIG instances hold their GPU's: MIG-GPU-.../1/0."""
    return bare_uuid(uuid).partition("/")[0]


def preferred(free: Sequence[str], count: int, gpus: Mapping[str, Gpu]) -> tuple[str, ...]:
    """The `count` devices that work best together, of those that are free; the first ones if nothing is known."""
    return tuple(best(itertools.combinations(free, count), free, count, gpus) or free[:count])


def best(
    groups: Iterable[tuple[str, ...]], free: Sequence[str], count: int, gpus: Mapping[str, Gpu]
) -> tuple[str, ...] | None:
    """The best of these groups of free devices; the first one if nothing is known. None if there is no group."""
    groups = iter(groups)
    first = next(groups, None)
    known = count > 1 and all(name in gpus for name in free)
    if first is None or not known or math.comb(len(free), count) > _MOST_GROUPS:
        return first
    return min(itertools.chain([first], groups), key=lambda group: _cost(group, free, gpus))


def _cost(group: Sequence[str], free: Sequence[str], gpus: Mapping[str, Gpu]) -> tuple[float, ...]:
    """First NVLink among all, then few NUMA nodes, then short ways; then what leaves the other devices together."""
    rest = [name for name in free if name not in group]
    pairs = list(itertools.combinations(group, 2))
    numa = {gpus[name].numa_node for name in group}
    numa_of_rest = sum(gpus[one].numa_node in numa for one in rest)
    return (
        -sum(_is_linked(gpus[one], gpus[other]) for one, other in pairs),
        len(numa),
        sum(gpus[other].links.get(gpus[one].uuid, GpuLink()).distance for one, other in pairs),
        sum(_is_linked(gpus[one], gpus[other]) for one in group for other in rest),
        numa_of_rest,
    )


def _is_linked(one: Gpu, other: Gpu) -> bool:
    return one.uuid in other.links and other.links[one.uuid].nvlink


def nvlinks(names: Sequence[str], gpus: Mapping[str, Gpu]) -> list[tuple[int, ...] | None]:
    """For each device, the numbers of those that NVLink connects it to; None if it is not known."""
    return [
        tuple(at for at, other in enumerate(names) if other in gpus and _is_linked(gpus[name], gpus[other]))
        if name in gpus
        else None
        for name in names
    ]


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
    return tuple(replace(one, nvlinks=numbers) for one, numbers in zip(facts, linked, strict=True))


_EFFECTS = {
    ComputeMode.EXCLUSIVE_PROCESS: "only one process at a time can use it, and tests with several ranks on it fail",
    ComputeMode.PROHIBITED: "no process can use it",
}


def warnings_of(gpus: Mapping[str, Gpu]) -> list[str]:
    """Warnings about the devices of a run, by name."""
    found = []
    for mode, what in _EFFECTS.items():
        if names := [name for name, gpu in gpus.items() if gpu.compute_mode is mode]:
            devices = f"device{'s' if len(names) > 1 else ''} {', '.join(names)}"
            found.append(f"the compute mode of {devices} is {mode.value}: {what} (nvidia-smi -c DEFAULT changes it)")
    return found
