"""Records the events of a run for the reports that are written at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..events import AttemptEnded, Event, RunBegan, RunEnded, UnitBegan, UnitEnded
from ..model import Attempt, Lease, Summary, Unit


@dataclass(frozen=True)
class Span:
    """The time in which a unit held its lease."""

    unit: Unit
    lease: Lease
    began: float
    ended: float


@dataclass(frozen=True)
class History:
    """Everything that happened in a run."""

    run: RunBegan
    summary: Summary
    attempts: tuple[Attempt, ...]  # in the order in which they ended
    spans: tuple[Span, ...]


@dataclass
class Recorder:
    """Collects the events of a run. Units that still run at its end are recorded as ending then."""

    _run: RunBegan = field(default_factory=lambda: RunBegan((), (), (), 0, 0.0))
    _attempts: list[Attempt] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    _open: dict[tuple[int, int, int], UnitBegan] = field(default_factory=dict)

    def on_event(self, event: Event) -> None:
        match event:
            case RunBegan():
                self._run = event
            case UnitBegan(unit):
                self._open[_key(unit)] = event
            case UnitEnded(unit, _, at):
                self._close(self._open.pop(_key(unit)), at)
            case AttemptEnded(attempt):
                self._attempts.append(attempt)
            case _:
                pass

    def history(self, end: RunEnded) -> History:
        """Everything that happened until the end of the run."""
        for began in self._open.values():
            self._close(began, end.summary.seconds)
        self._open.clear()
        return History(self._run, end.summary, tuple(self._attempts), tuple(self._spans))

    def _close(self, began: UnitBegan, at: float) -> None:
        self._spans.append(Span(began.unit, began.lease, began.at, max(began.at, at)))


def _key(unit: Unit) -> tuple[int, int, int]:
    return unit.number, unit.repetition, unit.attempt
