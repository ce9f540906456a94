"""The GPUs of the devices of a run, and which of them NVLink connects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from torch_testing_ext._machine.device_needs import DeviceFacts
from torch_testing_ext._machine.visible_devices import bare_uuid
from torch_testing_ext._process.questions import NoAnswer

from .client import Nvml, open_nvml
from .gpus import ComputeMode, Gpu


def gpus_by_name(
    names: Iterable[str], identities: Mapping[str, str], gpus: Sequence[Gpu], environ: Mapping[str, str]
) -> dict[str, Gpu]:
    """The GPU of each device, as far as it is known: by UUID, which may be abbreviated.

    CUDA's numbers are NVML's only with CUDA_DEVICE_ORDER=PCI_BUS_ID, and without a mask.
    """
    in_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    by_name = {}
    for name in names:
        matches = matching_gpus(identities.get(name, name), gpus)
        is_number = name.isdecimal() and name not in identities
        if len(matches) == 1:
            by_name[name] = matches[0]
        elif in_order and is_number and int(name) < len(gpus):
            by_name[name] = gpus[int(name)]
    return by_name


def matching_gpus(uuid: str, gpus: Iterable[Gpu]) -> list[Gpu]:
    """The GPUs with this UUID or one that begins so."""
    wanted = bare_uuid(uuid)
    if not wanted or uuid.isdecimal():
        return []
    return [gpu for gpu in gpus if bare_uuid(gpu.uuid).startswith(wanted)]


def nvlinks(names: Sequence[str], gpus: Mapping[str, Gpu]) -> list[tuple[int, ...] | None]:
    """For each device, the numbers of those that NVLink connects it to; None if it is not known."""
    known = {number: gpus[name] for number, name in enumerate(names) if name in gpus}
    links: list[tuple[int, ...] | None] = []
    for name in names:
        gpu = gpus.get(name)
        if gpu is None:
            links.append(None)
        else:
            linked = [number for number, other in known.items() if other.uuid in gpu.nvlinks]
            links.append(tuple(linked))
    return links


def with_nvlinks(
    facts: Sequence[DeviceFacts], uuids: Sequence[str], open_it: Callable[[], Nvml] = open_nvml
) -> tuple[DeviceFacts, ...]:
    """The facts with the numbers of the devices that NVLink connects each to; as they are, where NVML does not say.

    `uuids`: of each device, as torch gives them, without the prefix that NVML's have.
    """
    if len(uuids) != len(facts) or len(facts) < 2:
        return tuple(facts)
    try:
        with closing(open_it()) as nvml:
            gpus = nvml.gpus()
    except NoAnswer:
        return tuple(facts)
    linked = nvlinks(uuids, gpus_by_name(uuids, {}, gpus, {}))
    return tuple(replace(device, nvlinks=numbers) for device, numbers in zip(facts, linked, strict=True))


_EFFECTS = {
    ComputeMode.EXCLUSIVE_PROCESS: "only one process at a time can use it, and tests with several ranks on it fail",
    ComputeMode.PROHIBITED: "no process can use it",
}


def warnings_about_devices(gpus: Mapping[str, Gpu]) -> list[str]:
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
