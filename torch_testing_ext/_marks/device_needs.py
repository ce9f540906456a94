"""Decorators that say what a test needs of its devices: memory, compute capability, peer access, NVLink.

A runner reads them before it starts the test, and leases devices that have it; a test that cannot get any is skipped.
Without a runner, a test may use any device that its process sees: all of these must have what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch_testing_ext._machine import accelerators, device_facts
from torch_testing_ext._machine.device_facts import DeviceFacts, DeviceNeeds
from torch_testing_ext._machine.sharing import read_bytes

from .needs import TEST_SKIPS, Need, TestSkip, requires, too_few_devices

F = TypeVar("F", bound=Callable[..., Any])


def requires_memory(amount: str) -> Callable[[F], F]:
    """Skip on devices with less memory than `amount`, such as "20 GB" or "512 MiB"."""
    return _requires(DeviceNeeds(memory=read_bytes(amount)))


def requires_sm(major: int, minor: int = 0) -> Callable[[F], F]:
    """Skip on CUDA devices of a lower compute capability, such as 9, 0 for Hopper."""
    for part in (major, minor):
        if isinstance(part, bool) or not isinstance(part, int) or part < 0:
            raise ValueError(f"requires_sm({major!r}, {minor!r}): write two numbers, such as requires_sm(9, 0)")
    return _requires(DeviceNeeds(capability=(major, minor)))


def requires_peer_access() -> Callable[[F], F]:
    """Skip unless there are several devices that can read each other's memory."""
    return _requires(DeviceNeeds(peer_access=True))


def requires_nvlink() -> Callable[[F], F]:
    """Skip unless there are several devices that NVLink connects with each other."""
    return _requires(DeviceNeeds(nvlink=True))


def _requires(wanted: DeviceNeeds) -> Callable[[F], F]:
    needed = 2 if wanted.of_several else 1

    def unmet() -> TestSkip | None:
        count = accelerators.device_count()
        if not count:
            return TEST_SKIPS["no_accelerator"]
        if count < needed:
            return too_few_devices(needed)  # also where ranks share one: it has no connection
        why = device_facts.why_not(_facts(wanted), wanted, count)
        return TestSkip(TEST_SKIPS["generic"].exit_code, f"needs {wanted}: {why}") if why is not None else None

    return requires(Need(unmet, devices=needed, of_devices=wanted))


def _facts(wanted: DeviceNeeds) -> tuple[DeviceFacts, ...]:
    facts = accelerators.device_facts()
    if not wanted.nvlink:
        return facts
    from torch_testing_ext._machine import topology  # NVML's part is a tenth of the kit's import

    return topology.with_nvlinks(facts, accelerators.device_uuids())
