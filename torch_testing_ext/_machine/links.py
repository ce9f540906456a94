"""Which devices NVLink connects, as NVML says: torch does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from .device_facts import DeviceFacts
from .nvml import Nvml, NvmlError, open_nvml
from .topology import gpus_by_name, nvlinks


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
    except NvmlError:
        return tuple(facts)
    linked = nvlinks(uuids, gpus_by_name(uuids, {}, gpus, {}))
    return tuple(replace(one, nvlinks=numbers) for one, numbers in zip(facts, linked, strict=True))
