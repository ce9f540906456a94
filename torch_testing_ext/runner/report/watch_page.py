"""The page of `--watch`: what runs, what has failed and the first line of each failure."""

from __future__ import annotations

import sys
import time
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.live import Live as Region
from rich.text import Text

from ..events import Event, RunBegan, RunEnded, StatusRequested, TestFinished
from ..model import Category
from ..options.options import Options
from . import text
from .live import Live
from .terminal import TerminalStream

KEYS = "a all  f failed  l last output  w where  q quit"
REDRAW = 0.25
_REST = 8  # lines of the page for other things than failures


class WatchPage:
    """Draws the page on the other screen of the terminal: `with WatchPage(options, output) as page:`."""

    def __init__(self, options: Options, output: IO[bytes]):
        """`output`: that of the last run."""
        self._options, self._output = options, output
        self._console = Console(highlight=False)
        self._region = Region(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live: Live | None = None  # of the run
        self._status, self._stacks = "", ""
        self._drawn_at = 0.0
        self.failures: dict[str, str] = {}  # the first line of each, by test

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
        self._status, self._stacks = "", ""
        self._live = Live(TerminalStream(sys.stdout), self._options.policy, shows=False)
        self.show_page()

    def on_event(self, event: Event) -> None:
        if self._live is not None:
            self._live.on_event(event)
        match event:
            case RunBegan():
                self.failures.clear()  # each of these tests runs again
            case TestFinished(finished) if self._options.policy.verdict_on(finished) is Category.FAILED:
                self.failures[str(finished.test.id)] = finished.last.title or finished.outcome.value
            case StatusRequested(running):
                self._stacks = "\n\n".join(f"{one.test.id}\n{one.stacks}" for one in running)
            case RunEnded(summary):
                self._status = summary.error.strip().rpartition("\n")[2]

    def end(self, code: int, files: int) -> None:
        counts = self._live.by_category if self._live is not None else {}
        self._live = None
        done = ", ".join(f"{counts[one]} {one.value}" for one in Category if counts.get(one))
        what = self._status or done or self._read_output().strip().rpartition("\n")[2] or f"exit code {code}"
        self._status = f"{what} · {time.strftime('%H:%M:%S')} · watching {text.count(files, 'file')}"
        self.show_page()

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
        if self._region.is_started and time.monotonic() - self._drawn_at > (REDRAW if self._live else 1.0):
            self._drawn_at = time.monotonic()
            self._region.update(self._draw(), refresh=True)

    def _draw(self) -> RenderableType:
        height, width = self._console.height, self._console.width
        lines = [self._live.draw() if self._live else Text(self._status, style="bold", overflow="fold")]
        most = max(1, (height - _REST - (8 if self._live else 0)) // 2)
        failures = [*self.failures.items()]
        for name, why in failures[:most]:
            lines += [_line(name, "red", width), _line(f"  {why}", "", width)]
        if len(failures) > most:
            lines.append(_line(f"and {len(failures) - most} more failed", "red", width))
        lines += [_line(one, "dim", width) for one in self._stacks.splitlines()[: max(0, height - 4 - 2 * len(lines))]]
        return Group(*lines, Text(), _line(KEYS, "dim", width))


def _line(words: str, style: str, width: int) -> Text:
    line = Text(text.printable(words), style=style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line
