"""Needs of devices: memory, compute capability, peer access, NVLink.

A runner leases devices that have it. Without one, all devices that the process sees must have what the test needs.
"""

from collections.abc import Callable

from torch_testing_ext._machine import accelerators, device_needs
from torch_testing_ext._machine.device_needs import DeviceFacts, DeviceNeeds
from torch_testing_ext._machine.device_sharing import read_bytes

from .needs import _GENERIC, TEST_SKIPS, F, Need, TestSkip, requires, too_few_devices


def requires_memory(amount: str) -> Callable[[F], F]:
    """Decorator: skip on devices with less memory than `amount`, such as "20 GB" or "512 MiB"."""
    return _requires(DeviceNeeds(memory=read_bytes(amount)))


def requires_sm(major: int, minor: int = 0) -> Callable[[F], F]:
    """Decorator: skip on CUDA devices with a lower compute capability: `@requires_sm(9, 0)` needs Hopper."""
    for part in (major, minor):
        if isinstance(part, bool) or not isinstance(part, int) or part < 0:
            raise ValueError(f"requires_sm({major!r}, {minor!r}): write two numbers, such as requires_sm(9, 0)")
    return _requires(DeviceNeeds(capability=(major, minor)))


def requires_peer_access() -> Callable[[F], F]:
    """Decorator: skip unless there are several devices that can read each other's memory."""
    return _requires(DeviceNeeds(peer_access=True))


def requires_nvlink() -> Callable[[F], F]:
    """Decorator: skip unless NVLink connects several devices with each other."""
    return _requires(DeviceNeeds(nvlink=True))


def _requires(wanted: DeviceNeeds) -> Callable[[F], F]:
    """Skip unless all devices that the process sees meet these needs."""
    needed = 2 if wanted.of_several else 1

    def unmet() -> TestSkip | None:
        count = accelerators.device_count()
        if not count:
            return TEST_SKIPS["no_accelerator"]
        if count < needed:
            # This holds where ranks share a device, too: it has no connection.
            return too_few_devices(needed)
        why = device_needs.why_not(_facts(wanted), wanted, count)
        if why is None:
            return None
        return TestSkip(_GENERIC, f"needs {wanted}: {why}")

    return requires(Need(unmet, devices=needed, of_devices=wanted))


def _facts(wanted: DeviceNeeds) -> tuple[DeviceFacts, ...]:
    facts = accelerators.device_facts()
    if not wanted.nvlink:
        return facts
    # NVML's part is a tenth of the kit's import.
    from torch_testing_ext._machine import nvml

    return nvml.with_nvlinks(facts, accelerators.device_uuids())
