"""Texts that processes wrote: cut to a readable length, and without what differs by accident."""

import os
import re
import unicodedata
from pathlib import Path
from typing import BinaryIO

LONGEST = 64 * 1024
# Escape sequences that colour text or move the cursor.
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


def without_colours(text: str) -> str:
    """A text without what only a terminal understands."""
    return _TERMINAL.sub("", text) if "\x1b" in text else text


def cut_middle(text: str, longest: int) -> str:
    """The beginning and the end of a long text, with a note of how much is missing between them."""
    if len(text) <= longest:
        return text
    half = longest // 2
    edge = "\n" if "\n" in text else " "
    missing = len(text) - 2 * half
    note = f"... {missing} characters cut here ..."
    return edge.join((text[:half], note, text[-half:]))


def content_of(path: Path) -> bytes:
    """Return the bytes of a file; none if it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError):
        return b""


def text_of(path: Path) -> str:
    """Return the text of a file; none if it cannot be read."""
    return content_of(path).decode("utf-8", errors="replace")


def tail(path: Path, lines: int = 20, longest: int = 8_000, start: int = 0) -> str:
    """The last lines of a log from `start` on, without reading all of it."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start, size - longest))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def read_ends(path: Path, start: int = 0, end: int | None = None, longest: int = LONGEST) -> str:
    """A part of a file; of a long part its beginning and its end, with a note of how much is missing between them."""
    try:
        with path.open("rb") as file:
            if end is None:
                end = os.fstat(file.fileno()).st_size
            if end - start <= longest:
                return _text(file, start, end)
            half = longest // 2
            missing = end - start - 2 * half
            beginning = _text(file, start, start + half)
            ending = _text(file, end - half, end)
    except OSError:
        return ""
    return f"{beginning}\n... {missing} bytes cut here ...\n{ending}"


def _text(file: BinaryIO, start: int, end: int) -> str:
    file.seek(start)
    return file.read(end - start).decode("utf-8", errors="replace")


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


#
# Only what cannot be part of a failure is ignored. Two different values in an assertion are two different failures.
# Every rank imports this module: `re` compiles the patterns when a text is compared.
