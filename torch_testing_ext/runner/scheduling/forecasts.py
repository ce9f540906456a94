"""The forecast of a run from the expected durations of its units."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch_testing_ext.runner.model import (
    Lease,
    Span,
    Unit,
)

from .protocol import RunLeases
from .unit_queue import Queue, typical_seconds

# Earlier estimates would vary too much.
SECONDS_BEFORE_ESTIMATE = 2.0


def forecast(
    queue: Queue,
    leases: RunLeases,
    seconds_of: Callable[[Unit], float],
) -> Iterator[Span]:
    """Simulates the queue: yields the units in the order in which they start."""
    now = 0.0
    running: list[tuple[float, int, Lease]] = []
    while len(queue):
        unit = queue.take(leases.free_devices, leases.free_slots)
        if unit is not None:
            lease = leases.take(unit)
            end = now + seconds_of(unit)
            heapq.heappush(running, (end, unit.number, lease))
            yield Span(unit, lease, now, end)
        elif running:
            now, _, lease = heapq.heappop(running)
            leases.give_back(lease)


@dataclass
class Estimate:
    """Measures work in expected seconds, and extrapolates from the observed speed."""

    units: Sequence[Unit]
    _done: float = 0.0

    def __post_init__(self) -> None:
        self._typical = typical_seconds(self.units)
        self._total = sum(map(self._work, self.units))

    def _work(self, unit: Unit) -> float:
        return self._typical if unit.seconds is None else unit.seconds

    def done(self, unit: Unit) -> None:
        """Call this when a unit has ended."""
        self._done += self._work(unit)

    def left(self, now: float) -> float | None:
        """Seconds until the end of the run, or None if it is too early to say."""
        if now < SECONDS_BEFORE_ESTIMATE or not self._done:
            return None
        return max(0.0, self._total - self._done) * now / self._done
