"""A stream that may break, after which the run continues without it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Protocol, TextIO

from torch_testing_ext._process import user_commands


class LineWriter(Protocol):
    """Accepts whole lines of text."""

    def write(self, text: str) -> object: ...


class TerminalStream:
    """A stream that may break (a closed pipe, a full disk), after which the run continues without it.

    It has the methods of a stream, so that other libraries can write to it, too.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream
        self._broken = False

    def write(self, text: str) -> int:
        if not self._broken:
            try:
                self.stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
                self.stream.flush()
            except (OSError, ValueError) as error:
                # ValueError: it is closed.
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Does nothing: all that is written is flushed."""

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:
        return self.stream.encoding or "utf-8"

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        discard(self.stream)
        # The reader closed the pipe on purpose.
        if not isinstance(error, BrokenPipeError):
            # stderr may be broken, too.
            with suppress(OSError, ValueError):
                print(f"{user_commands.runner_name()}: console output stops here: {error}", file=sys.stderr)


def discard(stream: TextIO) -> None:
    """Let a stream that is broken end in /dev/null, with the text in its buffer: Python flushes it at its exit."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
