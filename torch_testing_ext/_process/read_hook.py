"""The audit hook by which a process sees what it reads.

`file_reads` keeps hashes of a project's files, for the next run; the warm server keeps stamps of all files, for its
own life. Libraries that watch files (watchfiles) tell what others write, not what this process reads.
"""

from __future__ import annotations

import contextlib
import os
import sys
from _thread import get_ident
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Paths that begin so are no files: what is read there differs each time.
NOT_FILES = ("/proc/", "/dev/", "/sys/")

_getcwd = os.getcwd  # a test may replace it in its module

Listener = Callable[..., None]  # takes the name of an event, and its arguments


class ReadHook:
    """Calls functions for audit events of this process and its forks; not for what these functions do themselves."""

    def __init__(self, listeners: Mapping[str, Listener], on_error: Callable[[str], None]):
        """`on_error`: is called with an event for which a function raises: what has caused the event goes on."""
        self._listeners, self._on_error = listeners, on_error
        self._busy: set[int] = set()  # threads that are in the hook
        sys.addaudithook(self._hook)

    def stop(self) -> None:
        """Call nothing any more. There is no way to remove a hook."""
        self._listeners = {}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Call nothing for what this thread does meanwhile."""
        self._busy.add(get_ident())
        try:
            yield
        finally:
            self._busy.discard(get_ident())

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Listeners may ask for the frame of the event's cause: it is the second one above their own."""
        if event in self._listeners and (thread := get_ident()) not in self._busy:
            self._busy.add(thread)
            try:
                self._listeners[event](event, *arguments)
            except Exception:
                self._on_error(event)
            finally:
                self._busy.discard(thread)


def path_of(argument: Any) -> str | None:
    """The absolute path of an event's argument; None for a descriptor. Without an argument, the working folder."""
    if isinstance(argument, int):
        return None
    path = os.fsdecode(argument or ".")
    return os.path.normpath(path if path.startswith(os.sep) else os.path.join(_getcwd(), path))


def may_write(flags: int) -> bool:
    """Whether a file was opened for more than reading."""
    return bool(flags & os.O_ACCMODE)
