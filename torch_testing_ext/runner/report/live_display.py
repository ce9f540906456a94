"""The live display on a terminal: counts, running tests with time and place, and the time left."""

from __future__ import annotations

import atexit
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TextIO, cast

from rich.console import Console as RichConsole, Group, RenderableType
from rich.live import Live as Region
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.events import (
    AttemptEnded,
    Event,
    Importing,
    RunBegan,
    RunEnded,
    TestBegan,
    TestFinished,
    UnitEnded,
)
from torch_testing_ext.runner.model import Lease, Policy, Test, TestId
from torch_testing_ext.runner.scheduling.forecasts import Estimate

from . import import_note, wording
from .console_layout import ConsoleLayout
from .terminal_stream import TerminalStream

# More running tests would push everything else off the screen.
MOST_TESTS = 8
MOST_FAILED = 5
REFRESHES_PER_SECOND = 4
# Columns.
BAR_WIDTH = 20
# With fewer columns, the place of a test leaves too few for its name.
NARROW = 72
GAP = "  "
_STYLE_OF_VERDICT = {TestOutcome.PASSED: "green", TestOutcome.FAILED: "red", TestOutcome.SKIPPED: "dim"}


@dataclass
class Live:
    """Draws the live display. It is also a writer: text that is written to it scrolls by above the display."""

    terminal: TerminalStream
    policy: Policy = field(default_factory=Policy)
    # Whether it draws itself; else another display draws it.
    shows: bool = True
    _running: dict[TestId, tuple[Test, Lease, float]] = field(default_factory=dict)
    by_verdict: Counter[TestOutcome] = field(default_factory=Counter)
    _importing: str = ""
    _failed: list[Test] = field(default_factory=list)
    _total: int = 0
    _estimate: Estimate = field(default_factory=lambda: Estimate(()))
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._terminal = RichConsole(file=cast(TextIO, self.terminal), highlight=False)
        self._region = Region(
            console=self._terminal,
            get_renderable=self.draw,
            transient=True,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def write(self, lines: str) -> None:
        if self._region.is_started:
            self._terminal.out(lines.removesuffix("\n"), highlight=False)
        else:
            self.terminal.write(lines)

    def on_event(self, event: Event) -> None:
        """Note what has changed; the display is drawn a few times a second."""
        match event:
            case Importing():
                self._importing = import_note.importing(event)
                self._start()
            case RunBegan():
                self._importing = ""
                self._total = event.results
                self._estimate = Estimate(event.units)
                self._began = time.monotonic()
                self._start()
            case TestBegan(test, _, lease, at):
                self._running[test.id] = (test, lease, at)
            case AttemptEnded(attempt):
                self._running.pop(attempt.test.id, None)
            case UnitEnded(unit):
                self._estimate.done(unit)
            case TestFinished(finished):
                verdict = self.policy.verdict_on(finished)
                self.by_verdict[verdict] += 1
                if verdict is TestOutcome.FAILED:
                    self._failed.append(finished.test)
            case RunEnded():
                self._region.stop()

    def _start(self) -> None:
        if self.shows and not self._region.is_started:
            # The terminal gets its cursor back, however the run ends.
            atexit.register(self._region.stop)
            self._region.start()

    def draw(self) -> RenderableType:
        """The display as rich shows it now: failures, counts and running tests."""
        if self._importing:
            return Text(self._importing, style="dim", no_wrap=True, overflow="ellipsis")
        now = time.monotonic() - self._began
        narrow = self._terminal.width < NARROW
        parts: list[RenderableType] = []
        more_failed = len(self._failed) - MOST_FAILED
        if more_failed > 0:
            parts.append(Text(f"{more_failed} more failed", style="dim"))
        for test in self._failed[-MOST_FAILED:]:
            parts.append(Text("failed ", style="red") + _name(test, narrow))
        parts.append(self._counts(now))
        parts.append(self._table(now, narrow))
        more = len(self._running) - MOST_TESTS
        if more > 0:
            parts.append(Text(f"and {more} more", style="dim"))
        return Group(*parts)

    def _table(self, now: float, narrow: bool) -> Table:
        """The tests that have been running for longest."""
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", style="dim", no_wrap=True)
        # This column shrinks on a narrow terminal.
        table.add_column()
        longest_first = sorted(self._running.values(), key=lambda running: running[2])
        for test, lease, began in longest_first[:MOST_TESTS]:
            cells: list[RenderableType] = [wording.duration(max(0.0, now - began)), _name(test, narrow)]
            if not narrow:
                cells.append(Text(wording.place(lease), style="dim", no_wrap=True))
            table.add_row(*cells)
        return table

    def _counts(self, now: float) -> RenderableType:
        """The bar, the numbers of tests, and the time."""
        finished = sum(self.by_verdict.values())
        parts = [Text(f"{finished}/{self._total}", "bold")]
        for verdict, style in _STYLE_OF_VERDICT.items():
            if self.by_verdict[verdict]:
                parts.append(Text(f"{self.by_verdict[verdict]} {verdict.value}", style))
        times = wording.duration(now)
        left = self._estimate.left(now)
        if left:
            times += f", about {wording.duration(left)} left"
        parts.append(Text(times, "dim"))
        rows = ConsoleLayout(self._terminal.width).rows([part.plain for part in parts], GAP)
        texts = [Text(GAP).join(parts[number] for number in row) for row in rows]
        lines = Text("\n").join(texts)
        needed = BAR_WIDTH + 2 * len(GAP) + lines.cell_len
        if len(rows) > 1 or needed > self._terminal.width:
            return lines
        bar = ProgressBar(total=max(self._total, 1), completed=finished, width=BAR_WIDTH)
        line = Table.grid(padding=(0, len(GAP)))
        line.add_row(bar, lines)
        return line


def _name(test: Test, short: bool) -> Text:
    """The name of a test without its folder, or only its last part."""
    name = test.id.method or test.id.cls if short else ""
    if not name:
        name = str(test.id).rpartition("/")[2]
    return Text(wording.printable(name), no_wrap=True, overflow="ellipsis")
