"""The output of a unit's tests so far: the length of the worker's log, and the folders of their ranks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from torch_testing_ext.launch import device_memory

from ..model import DeviceMemory
from .unit_spec import UnitSpec


class UnitOutput:
    """The output of the unit that this process runs."""

    def __init__(self, unit: UnitSpec):
        self._unit = unit
        self._ranks_seen: set[str] = set()

    def begin_test(self) -> None:
        """A test begins."""
        device_memory.forget()

    def device_memory(self) -> DeviceMemory | None:
        """The most device memory that the test has had, in its ranks and in this process."""
        peak = device_memory.take()
        return None if peak is None else DeviceMemory(peak.allocated, peak.reserved, peak.processes)

    def length(self) -> int:
        """The current length of the log."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a test may have closed or replaced them: that is no failure
                stream.flush()
        return self._unit.log.stat().st_size

    def new_rank_directories(self) -> tuple[str, ...]:
        """The directories with the files of the ranks that were started since the last call."""
        new: list[str] = []
        with suppress(FileNotFoundError):  # made by the first test that starts ranks
            new = sorted(set(os.listdir(self._unit.ranks)) - self._ranks_seen)
        self._ranks_seen.update(new)
        return tuple(new)
