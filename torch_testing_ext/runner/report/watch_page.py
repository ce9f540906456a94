"""The page of `--watch`: what runs, what has failed and the first line of each failure."""

from __future__ import annotations

import sys
import time
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.live import Live as Region
from rich.text import Text

from torch_testing_ext._process.words import count
from torch_testing_ext._tests.outcomes import VERDICTS, TestOutcome
from torch_testing_ext.runner.events import (
    Event,
    RunBegan,
    RunEnded,
    StatusRequested,
    TestFinished,
)
from torch_testing_ext.runner.options import Options

from . import wording
from .live_display import Live
from .terminal_stream import TerminalStream

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
        # The display of the run.
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
            case TestFinished(finished) if self._options.policy.verdict_on(finished) is TestOutcome.FAILED:
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
        self._status = f"{result} · {time_of_day} · watching {count(files, 'file')}"
        self.show_page()

    def _counts(self) -> str:
        if self._live is None:
            return ""
        counts = self._live.by_verdict
        return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in VERDICTS if counts[verdict])

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
        self._console.out(wording.printable(self._read_output()), highlight=False)
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
    line = Text(wording.printable(words), style=style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _end_of(line: str, width: int) -> str:
    """The end of a line that is too long: a long path comes before the number of the line and the function."""
    return line if len(line) <= width else f"…{line[1 - width :]}"


def _last_line(words: str) -> str:
    return words.strip().rpartition("\n")[2]
