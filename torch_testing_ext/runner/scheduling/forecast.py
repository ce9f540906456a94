"""Predicts when each unit starts, and with which lease, if all take as long as expected. Pure; no process, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..model import Lease, Unit
from .leases import RunLeases
from .policy import Queue


@dataclass(frozen=True)
class PlannedStart:
    """The expected start and end of a unit, and its lease."""

    unit: Unit
    lease: Lease
    at: float
    until: float


def forecast(queue: Queue, leases: RunLeases, seconds_of: Callable[[Unit], float]) -> Iterator[PlannedStart]:
    """Simulates the queue: yields the units in the order in which they start."""
    now = 0.0
    running: list[tuple[float, int, Lease]] = []
    while len(queue):
        while (unit := queue.take(leases.free_devices, leases.free_slots)) is not None:
            lease = leases.take(unit)
            start = PlannedStart(unit, lease, now, now + seconds_of(unit))
            heapq.heappush(running, (start.until, unit.number, lease))
            yield start
        if running:
            now, _, lease = heapq.heappop(running)
            leases.give_back(lease)
