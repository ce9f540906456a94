"""The colours of the console report, and the width of its texts, rules and rows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from torch_testing_ext._process.logs import cut, width

from .console_style import Style, Styler

WIDEST_RULE = 100
# A title gets so many columns even if the name of its test leaves fewer.
SHORTEST_TITLE = 40
# Without a terminal, as in the log of a CI system, lines may be long, but not endless.
LONGEST_TERMINAL_TITLE = 300
# Characters of a message, and of one of its lines, on the console; the files have all of it.
LONGEST_SHOWN_MESSAGE = 30_000
LONGEST_LINE = 2_000


def table(heading: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    """Right-aligns the first column and indents further lines of a cell below its first line."""
    if not rows:
        return []
    width = max(len(first) for first, _ in rows) + 2
    below = "\n" + " " * (width + 2)
    lines = [heading]
    for first, second in rows:
        indented = second.replace("\n", below)
        lines.append(f"{first:>{width}}  {indented}")
    return lines


@dataclass(frozen=True)
class ConsoleLayout:
    """The space that the report has, where it is shown."""

    # The columns of the terminal; None if there is none.
    columns: int | None = None
    # The report file that has all of a message, if there is one.
    complete: str = ""
    # The command that shows all of the failure of a test whose name is appended.
    show: str = ""
    # Show all of each failure.
    whole: bool = False

    def rule(self, character: str) -> str:
        """A horizontal line."""
        columns = WIDEST_RULE if self.columns is None else min(WIDEST_RULE, self.columns)
        return character * columns

    def _room(self, taken: int = 0) -> int:
        """The columns for a title, in a line of which some are taken."""
        if self.columns is None:
            return LONGEST_TERMINAL_TITLE
        return max(SHORTEST_TITLE, self.columns - taken)

    def with_title(self, name: str, title: str) -> str:
        """A name and as much of a title as fits, in one line."""
        if not title:
            return name
        return f"{name}: {cut(title, self._room(width(name) + 2))}"

    def wrapped(self, words: str, indent: str, styler: Styler | None = None) -> list[str]:
        """A text broken between words, each line with an indent and in red if there is a styler."""
        columns = self._room()
        wrapped = textwrap.wrap(words, columns, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
        lines = []
        for line in wrapped:
            line = cut(line, columns)
            lines.append(line if styler is None else styler(Style.RED, line))
        return lines

    def rows(self, parts: Sequence[str], separator: str) -> list[list[int]]:
        """Distributes parts over rows that fit: for each row, the numbers of its parts."""
        rows: list[list[int]] = [[]]
        used = 0
        for number, part in enumerate(parts):
            more = width(part)
            if rows[-1]:
                more += len(separator)
            # The separator at the end of a row takes columns, too.
            needed = used + more + len(separator.rstrip())
            if self.columns is not None and rows[-1] and needed > self.columns:
                rows.append([])
                used = 0
                more = width(part)
            rows[-1].append(number)
            used += more
        return rows

    def message(self, words: str) -> str:
        """A message; very long lines and very long messages are cut in the middle, with a pointer to all of it."""
        lines = "\n".join(self._cut(line, LONGEST_LINE, " ") for line in words.split("\n"))
        return self._cut(lines, LONGEST_SHOWN_MESSAGE, "\n")

    def _cut(self, words: str, longest: int, edge: str) -> str:
        if len(words) <= longest:
            return words
        half = longest // 2
        where = f"{self.complete} has all of it" if self.complete else "--html FILE.html keeps all of it"
        note = f"... {len(words) - 2 * half} characters cut here; {where} ..."
        return f"{words[:half]}{edge}{note}{edge}{words[-half:]}"
