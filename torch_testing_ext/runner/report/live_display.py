"""The live display and the page of --watch; imports rich."""

from __future__ import annotations

import atexit
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import IO, TextIO, cast

from rich.console import Console, Console as RichConsole, Group, RenderableType
from rich.live import Live as Region
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torch_testing_ext.runner.model import (
    AttemptEnded,
    Category,
    Event,
    Importing,
    Lease,
    Policy,
    RunBegan,
    RunEnded,
    StatusRequested,
    Test,
    TestBegan,
    TestFinished,
    TestId,
    UnitEnded,
)
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.scheduling.plan import Estimate

from . import text
from .text import ConsoleLayout, TerminalStream

# --------------------------------------------------------------------------------------------------------------------
# The live display on a terminal: counts, running tests with time and place, and the time left. Needs rich.

# More running tests would push everything else off the screen.
MOST_TESTS = 8
MOST_FAILED = 5
REFRESHES_PER_SECOND = 4
# Columns.
BAR = 20
# With fewer columns, the place of a test leaves too few for its name.
NARROW = 72
GAP = "  "
_STYLES = {Category.PASSED: "green", Category.FAILED: "red", Category.SKIPPED: "dim"}


@dataclass
class Live:
    """Draws the live display. It is also a writer: text that is written to it scrolls by above the display."""

    terminal: TerminalStream
    policy: Policy = field(default_factory=Policy)
    # If not, another display draws it.
    shows: bool = True
    _running: dict[TestId, tuple[Test, Lease, float]] = field(default_factory=dict)
    by_category: Counter[Category] = field(default_factory=Counter)
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
                self._importing = text.importing(event)
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
                category = self.policy.verdict_on(finished)
                self.by_category[category] += 1
                if category is Category.FAILED:
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
            cells: list[RenderableType] = [text.duration(max(0.0, now - began)), _name(test, narrow)]
            if not narrow:
                cells.append(Text(text.place(lease), style="dim", no_wrap=True))
            table.add_row(*cells)
        return table

    def _counts(self, now: float) -> RenderableType:
        """The bar, the numbers of tests, and the time."""
        finished = sum(self.by_category.values())
        parts = [Text(f"{finished}/{self._total}", "bold")]
        for category, style in _STYLES.items():
            if self.by_category[category]:
                parts.append(Text(f"{self.by_category[category]} {category.value}", style))
        times = text.duration(now)
        left = self._estimate.left(now)
        if left:
            times += f", about {text.duration(left)} left"
        parts.append(Text(times, "dim"))
        rows = ConsoleLayout(self._terminal.width).rows([part.plain for part in parts], GAP)
        texts = [Text(GAP).join(parts[number] for number in row) for row in rows]
        lines = Text("\n").join(texts)
        needed = BAR + 2 * len(GAP) + lines.cell_len
        if len(rows) > 1 or needed > self._terminal.width:
            return lines
        bar = ProgressBar(total=max(self._total, 1), completed=finished, width=BAR)
        line = Table.grid(padding=(0, len(GAP)))
        line.add_row(bar, lines)
        return line


def _name(test: Test, short: bool) -> Text:
    """The name of a test without its folder, or only its last part."""
    name = test.id.method or test.id.cls if short else ""
    if not name:
        name = str(test.id).rpartition("/")[2]
    return Text(text.printable(name), no_wrap=True, overflow="ellipsis")


# --------------------------------------------------------------------------------------------------------------------
# The page of `--watch`: what runs, what has failed and the first line of each failure.

KEYS = "a all  f failed  l last output  w where  q quit"
REDRAW = 0.25
# Lines of the page for other things than failures, and more of them during a run.
_REST = 8
_REST_OF_RUN = 8


class WatchPage:
    """Draws the page on the other screen of the terminal: `with WatchPage(options, output) as page:`."""

    def __init__(self, options: Options, output: IO[bytes]):
        """`output`: that of the last run."""
        self._options = options
        self._output = output
        self._console = Console(highlight=False)
        self._region = Region(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        # Of the run.
        self._live: Live | None = None
        self._status = ""
        self._stacks = ""
        self._drawn_at = 0.0
        # The first line of each, by test.
        self.failures: dict[str, str] = {}

    def __enter__(self) -> WatchPage:
        self._region.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._region.stop()

    @property
    def width(self) -> int:
        return self._console.width

    # -- what happens

    def begin(self) -> None:
        self._status = ""
        self._stacks = ""
        self._live = Live(TerminalStream(sys.stdout), self._options.policy, shows=False)
        self.show_page()

    def on_event(self, event: Event) -> None:
        if self._live is not None:
            self._live.on_event(event)
        match event:
            case RunBegan():
                # Each of these tests runs again.
                self.failures.clear()
            case TestFinished(finished) if self._options.policy.verdict_on(finished) is Category.FAILED:
                self.failures[str(finished.test.id)] = finished.last.title or finished.outcome.value
            case StatusRequested(tests):
                self._stacks = "\n\n".join(f"{running.test.id}\n{running.stacks}" for running in tests)
            case RunEnded(summary):
                self._status = _last_line(summary.error)

    def end(self, code: int, files: int) -> None:
        result = self._status or self._counts() or _last_line(self._read_output())
        if not result:
            result = f"exit code {code}"
        self._live = None
        time_of_day = time.strftime("%H:%M:%S")
        self._status = f"{result} · {time_of_day} · watching {text.count(files, 'file')}"
        self.show_page()

    def _counts(self) -> str:
        if self._live is None:
            return ""
        counts = self._live.by_category
        return ", ".join(f"{counts[category]} {category.value}" for category in Category if counts[category])

    def say(self, status: str) -> None:
        self._status = status
        self.show_page()

    def _read_output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    # -- the screen

    def show_page(self) -> None:
        if not self._region.is_started:
            self._region.start()
        self._drawn_at = 0.0
        self.refresh()

    def show_output(self) -> None:
        """Show all output of the last run on the usual screen, where the terminal keeps what scrolls by."""
        self._region.stop()
        self._console.out(text.printable(self._read_output()), highlight=False)
        self._console.out("any key: back to the page", highlight=False)

    def refresh(self) -> None:
        """Draw the page, if it may have changed."""
        if not self._region.is_started:
            return
        interval = 1.0 if self._live is None else REDRAW
        if time.monotonic() - self._drawn_at > interval:
            self._drawn_at = time.monotonic()
            self._region.update(self._draw(), refresh=True)

    def _draw(self) -> RenderableType:
        """The run or its result, then failures and stacks, as many as fit."""
        height = self._console.height
        width = self._console.width
        lines: list[RenderableType] = []
        room = height - _REST
        if self._live is None:
            lines.append(Text(self._status, style="bold", overflow="fold"))
        else:
            lines.append(self._live.draw())
            room -= _REST_OF_RUN
        most = max(1, room // 2)
        failures = list(self.failures.items())
        for name, why in failures[:most]:
            lines.append(_line(name, "red", width))
            lines.append(_line(f"  {why}", "", width))
        if len(failures) > most:
            lines.append(_line(f"and {len(failures) - most} more failed", "red", width))
        room_for_stacks = max(0, height - 4 - 2 * len(lines))
        for stack_line in self._stacks.splitlines()[:room_for_stacks]:
            lines.append(_line(_end_of(stack_line, width), "dim", width))
        return Group(*lines, Text(), _line(KEYS, "dim", width))


def _line(words: str, style: str, width: int) -> Text:
    line = Text(text.printable(words), style=style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _end_of(line: str, width: int) -> str:
    """The end of a line that is too long: a long path comes before the number of the line and the function."""
    return line if len(line) <= width else f"…{line[1 - width :]}"


def _last_line(words: str) -> str:
    return words.strip().rpartition("\n")[2]
