"""Typed messages as lines of JSON over any byte stream."""

import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from torch_testing_ext._process import messages

Received = TypeVar("Received")

_LINES_AT_ONCE = 1 << 18
# Seconds that a message which is not urgent waits for others.
_LINGER = 0.05
# Characters of a line that is no message.
_SHOWN = 200


class NotAMessage(Exception):
    """A line on the stream is not a message of the expected types; the text says which."""


def _in_json(text: str) -> bytes:
    """The text as a part of a string of JSON."""
    return json.dumps(text)[1:-1].encode()


class MessageReader(Generic[Received]):
    """Reads messages from a descriptor. `receives` is the union of their types."""

    def __init__(
        self,
        fd: int,
        receives: Any,
        first: type | None = None,
        renamed: tuple[str, str] = ("", ""),
    ):
        """`first`: lines before the first message of this type are not for us, such as what a login shell prints.

        `renamed`: a path in all texts, and the path that it gets.
        """
        there, here = renamed
        self._fd = fd
        self._kinds = messages.by_name(receives)
        self._first = first
        self._there = _in_json(there)
        self._here = _in_json(here)
        self._lines = messages.LineBuffer()
        # The lines before the first message.
        self.ignored: list[str] = []

    def fileno(self) -> int:
        return self._fd

    def receive(self) -> list[Received]:
        """Wait for data and return the messages that are complete. Raises EOFError at the end, and NotAMessage."""
        try:
            data = os.read(self._fd, _LINES_AT_ONCE)
        except (ConnectionResetError, BrokenPipeError):
            data = b""
        if not data:
            raise EOFError
        return list(self._messages(self._lines.add(data)))

    def _messages(self, lines: list[bytes]) -> Iterator[Received]:
        """The messages of whole lines. Raises NotAMessage."""
        for line in lines:
            if self._there and self._there in line:
                line = line.replace(self._there, self._here)
            try:
                message = messages.from_json(line, self._kinds)
            except Exception:
                # Whatever it is, it is none of our messages.
                if self._first is None:
                    shown = line[:_SHOWN].decode("utf-8", "replace")
                    raise NotAMessage(f"{shown!r} is not a message") from None
                self.ignored.append(line[:_SHOWN].decode("utf-8", "replace"))
                continue
            if self._first is not None and isinstance(message, self._first):
                self._first = None
            yield message


class MessageWriter:
    """Writes messages to a descriptor in a thread of its own: a reader that is slow does not hold up the sender."""

    def __init__(self, fd: int):
        self._fd = fd
        self._lines: queue.SimpleQueue[tuple[bytes, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: Any, urgent: bool = True) -> None:
        """A message that is not urgent may wait for the next one: each piece of the stream costs a call of Ray."""
        self._lines.put((messages.to_line(message), urgent))

    def finish(self, timeout: float) -> None:
        """Write what waits, for at most `timeout` seconds."""
        self._lines.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        # If the reader is gone, only reading shows it.
        with suppress(OSError):
            more = True
            while more:
                lines, more = self._next_lines()
                data = b"".join(lines)
                while data:
                    data = data[os.write(self._fd, data) :]

    def _next_lines(self) -> tuple[list[bytes], bool]:
        """All that wait, as soon as one is urgent or has waited for a while; and whether more may come."""
        lines: list[bytes] = []
        until = None
        with suppress(queue.Empty):
            while True:
                item = self._lines.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
                if item is None:
                    return lines, False
                line, urgent = item
                lines.append(line)
                if urgent:
                    until = 0.0
                elif until is None:
                    until = time.monotonic() + _LINGER
        return lines, True
