"""The record of the events of a run, for the reports that are made at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_testing_ext.runner.events import (
    AttemptEnded,
    Event,
    Importing,
    RunBegan,
    RunEnded,
    UnitBegan,
    UnitEnded,
)
from torch_testing_ext.runner.model import Attempt, Span, Summary


@dataclass(frozen=True)
class ImportSpan:
    """The time in which torch, or a test file, was imported."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class History:
    """Everything that happened in a run."""

    run: RunBegan
    summary: Summary
    # The attempts in the order in which they ended.
    attempts: tuple[Attempt, ...]
    spans: tuple[Span, ...]
    # Before the run: their times are negative.
    imports: tuple[ImportSpan, ...] = ()


@dataclass
class Recorder:
    """Collects the events of a run. Units that still run at its end are recorded as ending then."""

    _run: RunBegan = field(default_factory=lambda: RunBegan((), (), (), 0, 0.0))
    _attempts: list[Attempt] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    # The units that run, by number.
    _open: dict[int, UnitBegan] = field(default_factory=dict)
    _importing: dict[str, float] = field(default_factory=dict)
    _imports: list[ImportSpan] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        match event:
            case Importing():
                self._import(event.files or ("torch",), event.at)
            case RunBegan():
                self._run = event
                self._import((), event.clock)
            case UnitBegan(unit):
                self._open[unit.number] = event
            case UnitEnded(unit, _, at):
                self._close(self._open.pop(unit.number), at)
            case AttemptEnded(attempt):
                self._attempts.append(attempt)

    def history(self, end: RunEnded) -> History:
        """Everything that happened until the end of the run."""
        for began in self._open.values():
            self._close(began, end.summary.seconds)
        self._open.clear()
        clock = self._run.clock
        imports = (ImportSpan(span.name, span.began - clock, span.ended - clock) for span in self._imports)
        return History(self._run, end.summary, tuple(self._attempts), tuple(self._spans), tuple(imports))

    def _import(self, files: Sequence[str], at: float) -> None:
        """From now on, these are being imported."""
        for name in [name for name in self._importing if name not in files]:
            self._imports.append(ImportSpan(name, self._importing.pop(name), at))
        self._importing |= {name: at for name in files if name not in self._importing}

    def _close(self, began: UnitBegan, at: float) -> None:
        self._spans.append(Span(began.unit, began.lease, began.at, max(began.at, at)))
