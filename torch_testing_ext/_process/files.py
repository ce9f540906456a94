"""Files that are written completely or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from os import fstat
from pathlib import Path

DESCRIPTORS_CLOSED = "the test closed file descriptors of its process that were not its own (os.close, os.closerange)"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by one with this text: a reader sees the old text or the new text, never a part.

    A path that is not a regular file (a pipe, a device) cannot be replaced; it is written directly.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def file_behind(fd: int) -> tuple[int, int] | None:
    """Identify the file of a descriptor; None if it is closed. Another file may have got its number since."""
    try:
        status = fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino
