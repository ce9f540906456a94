"""The record of the events of a run, for the reports that are made at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_testing_ext._process.files import write_atomically
from torch_testing_ext._process.words import grouped
from torch_testing_ext.runner.events import (
    AttemptEnded,
    Event,
    Importing,
    RunBegan,
    RunEnded,
    UnitBegan,
    UnitEnded,
)
from torch_testing_ext.runner.model import Attempt, Lease, Span, Summary


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


# -- files

Render = Callable[[History], str]


@dataclass
class FileReport:
    """Records a run, and writes a file at its end. A file that cannot be written causes a warning."""

    path: Path
    render: Render
    warn: Callable[[str], None]
    _recorder: Recorder = field(default_factory=Recorder)

    def on_event(self, event: Event) -> None:
        self._recorder.on_event(event)
        if isinstance(event, RunEnded):
            self._write(self._recorder.history(event))

    def _write(self, history: History) -> None:
        try:
            write_atomically(self.path, self.render(history))
        except OSError as error:
            self.warn(f"{self.path} could not be written ({error}); the outcome of the run is not affected")
        except Exception as error:
            self.warn(f"{self.path} could not be written: internal error: {type(error).__name__}: {error}")
            raise


# -- lanes, for the timeline and the trace


@dataclass(frozen=True)
class Lane:
    """A device or CPU slot, and what ran on it."""

    # "gpu 3", "cpu 0".
    name: str
    is_device: bool
    spans: tuple[Span, ...]
    attempts: tuple[Attempt, ...]


def all_lanes(history: History) -> list[Lane]:
    """All lanes of the inventory, also those on which nothing ran: idle devices should be visible."""
    spans = grouped((name, span) for span in history.spans for name in lanes_of(span.lease))
    attempts = grouped((name, attempt) for attempt in history.attempts for name in lanes_of(attempt.lease))
    # Nodes may join a run.
    everything = [*_inventory(history.run), *(span.lease for span in history.spans)]
    names = dict.fromkeys((lease.node, name) for lease in everything for name in lanes_of(lease))
    nodes = list(dict.fromkeys(node for node, _ in names))
    return [
        Lane(name, name.rpartition(" ")[0].endswith("gpu"), tuple(spans.get(name, ())), tuple(attempts.get(name, ())))
        for _, name in sorted(names, key=lambda lane: nodes.index(lane[0]))
    ]


def _inventory(run: RunBegan) -> list[Lease]:
    """All that a run may lease: of this machine, or of each node."""
    if run.nodes:
        return [Lease(node.devices, tuple(range(node.slots)), node=node.name) for node in run.nodes]
    return [Lease(run.devices, tuple(range(run.slots)))]


def lanes_of(lease: Lease) -> Iterator[str]:
    """The names of the lanes on which the tests with a lease are drawn."""
    on = f"{lease.node} " if lease.node else ""
    yield from (f"{on}gpu {device}" for device in lease.devices)
    yield from (f"{on}cpu {slot}" for slot in lease.slots)
