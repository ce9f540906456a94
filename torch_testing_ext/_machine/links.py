"""Which devices NVLink connects, as NVML says: torch does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .device_facts import DeviceFacts
from .nvml import Nvml, NvmlError, open_nvml


def with_nvlinks(
    facts: Sequence[DeviceFacts], uuids: Sequence[str], open_it: Callable[[], Nvml] = open_nvml
) -> tuple[DeviceFacts, ...]:
    """The facts with the numbers of the devices that NVLink connects each to; as they are, where NVML does not say.

    `uuids`: of each device, as torch gives them, without the prefix that NVML's have.
    """
    if len(uuids) != len(facts) or len(facts) < 2:
        return tuple(facts)
    try:
        nvml = open_it()
    except NvmlError:
        return tuple(facts)
    try:
        gpus = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in nvml.gpus()}
    except NvmlError:
        return tuple(facts)
    finally:
        nvml.close()
    number_of = {uuid.removeprefix("GPU-"): number for number, uuid in enumerate(uuids)}
    found = []
    for one, uuid in zip(facts, number_of, strict=False):
        gpu = gpus.get(uuid)
        linked = [other.removeprefix("GPU-") for other, link in gpu.links.items() if link.nvlink] if gpu else None
        numbers = None if linked is None else tuple(number_of[other] for other in linked if other in number_of)
        found.append(replace(one, nvlinks=numbers))
    return tuple(found) if len(found) == len(facts) else tuple(facts)
