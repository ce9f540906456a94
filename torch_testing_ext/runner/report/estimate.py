"""Estimates how long a run still takes, from the expected durations of its units. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import mean

from ..model import Unit

# Earlier estimates would vary too much.
SECONDS_BEFORE_ESTIMATE = 2.0


@dataclass
class Estimate:
    """Measures work in expected seconds, and extrapolates from the observed speed."""

    units: Collection[Unit]
    _done: float = 0.0
    _typical: float = field(init=False)

    def __post_init__(self) -> None:
        known = [unit.seconds for unit in self.units if unit.seconds is not None]
        self._typical = mean(known) if known else 1.0
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
