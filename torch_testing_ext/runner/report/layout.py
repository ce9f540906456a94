"""The layout of the console report in its terminal: the width of texts, rules and rows. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

WIDEST_RULE = 100
# A title gets so many columns even if the name of its test leaves fewer.
SHORTEST_TITLE = 40
# Without a terminal, as in the log of a CI system, lines may be long, but not endless.
LONGEST_TITLE = 300
# Characters of a message, and of one of its lines, on the console; the files have all of it.
LONGEST_MESSAGE = 30_000
LONGEST_LINE = 2_000


@dataclass(frozen=True)
class ConsoleLayout:
    """The space that the report has, where it is shown."""

    columns: int | None = None  # of the terminal; None if there is none
    complete: str = ""  # the report file that has all of a message, if there is one

    def rule(self, character: str) -> str:
        """A horizontal line."""
        return character * min(WIDEST_RULE, self.columns or WIDEST_RULE)

    def with_title(self, name: str, title: str) -> str:
        """A name and as much of a title as fits, in one line."""
        if not title:
            return name
        columns = LONGEST_TITLE if self.columns is None else max(SHORTEST_TITLE, self.columns - width(name) - 2)
        return f"{name}: {cut(title, columns)}"

    def rows(self, parts: Sequence[str], separator: str) -> list[list[int]]:
        """Distributes parts over rows that fit: for each row, the numbers of its parts."""
        rows: list[list[int]] = [[]]
        used = 0
        for number, part in enumerate(parts):
            more = width(part) + (len(separator) if rows[-1] else 0)
            # The separator at the end of a row takes columns, too.
            if self.columns is not None and rows[-1] and used + more + len(separator.rstrip()) > self.columns:
                rows.append([])
                used, more = 0, width(part)
            rows[-1].append(number)
            used += more
        return rows

    def message(self, words: str) -> str:
        """A message; very long lines and very long messages are cut in the middle, with a pointer to all of it."""
        lines = "\n".join(self._cut(line, LONGEST_LINE, " ") for line in words.split("\n"))
        return self._cut(lines, LONGEST_MESSAGE, "\n")

    def _cut(self, words: str, longest: int, edge: str) -> str:
        if len(words) <= longest:
            return words
        half = longest // 2
        where = f"{self.complete} has all of it" if self.complete else "--report FILE.html keeps all of it"
        note = f"... {len(words) - 2 * half} characters cut here; {where} ..."
        return f"{words[:half]}{edge}{note}{edge}{words[-half:]}"


def width(text: str) -> int:
    """The number of columns that a text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """A text that takes at most so many columns, with dots if something is missing."""
    if width(text) <= columns:
        return text
    kept, used = "", 3
    for character in text:
        used += _width(character)
        if used > columns:
            break
        kept += character
    return f"{kept}..."
