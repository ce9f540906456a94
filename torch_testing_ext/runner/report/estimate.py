"""How long a run still takes, by what its units were expected to take. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import mean

from ..model import Unit

# Before this much is done, a guess would jump about.
SECONDS_BEFORE_A_GUESS = 2.0


@dataclass
class Estimate:
    """Work is measured in expected seconds; how fast it is done is seen, not assumed."""

    units: Collection[Unit]
    _done: float = 0.0
    _usual: float = field(init=False)

    def __post_init__(self) -> None:
        known = [unit.seconds for unit in self.units if unit.seconds is not None]
        self._usual = mean(known) if known else 1.0
        self._all = sum(map(self._work, self.units))

    def _work(self, unit: Unit) -> float:
        return self._usual if unit.seconds is None else unit.seconds

    def done(self, unit: Unit) -> None:
        self._done += self._work(unit)

    def left(self, now: float) -> float | None:
        """Seconds, or None where too little is known."""
        if now < SECONDS_BEFORE_A_GUESS or not self._done:
            return None
        return max(0.0, self._all - self._done) * now / self._done
