"""The most device memory that the ranks of a test have had: each rank's own account says it.

The process that runs tests notes what the ranks of a test say (`notes.take_notes`), and adds it up when the test has
ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch_testing_ext._process.words import grouped
from torch_testing_ext._tests import notes
from torch_testing_ext._tests.notes import Peaks
from torch_testing_ext.launch.accounts import forget_memory_of_this_process


class DevicePeak(NamedTuple):
    """The most memory that one test has had on one device; of several devices, on the one where that was most."""

    # Bytes in tensors.
    allocated: int
    # Bytes that torch's allocator held.
    reserved: int
    # The processes on that device.
    processes: int = 1


def forget_memory() -> None:
    """A test begins: forget what its ranks' and this process's predecessors have had."""
    notes.forget_memory()
    forget_memory_of_this_process()


def highest(peaks: Iterable[Peaks]) -> DevicePeak | None:
    """The sum of several processes, on the device where it is largest."""
    of_processes = (peak for of_process in peaks for peak in of_process)
    by_device = grouped((device, (allocated, reserved)) for device, allocated, reserved in of_processes)
    sums = []
    for sizes in by_device.values():
        allocated = sum(size for size, _ in sizes)
        reserved = sum(size for _, size in sizes)
        sums.append(DevicePeak(allocated, reserved, len(sizes)))
    return max(sums, key=lambda peak: peak.reserved, default=None)
