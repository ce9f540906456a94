"""File descriptors that the harness needs, and that a test may close by os.closerange()."""

from __future__ import annotations

import os

CLOSED = "the test closed file descriptors of its process that were not its own (os.close, os.closerange)"


def identity(fd: int) -> tuple[int, int] | None:
    """The file behind a descriptor; None if it is closed. Another file may have got its number since."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
