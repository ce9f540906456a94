"""Files that processes lock.

The lock is flock's: it belongs to the open file, ends with the last process that has it open, and is the same in
forks. `filelock` knows neither shared locks nor who holds one, and its descriptors are not ours to pass on.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeAlias

Lockable: TypeAlias = "int | IO[str] | IO[bytes]"


@contextmanager
def open_locked(path: Path, mode: str) -> Iterator[IO[str]]:
    """Open a file of text, once nobody else has it locked, for the length of a `with`. Reading begins at its start."""
    with path.open(mode, encoding="utf-8") as file:
        lock(file)
        file.seek(0)
        yield file


def lock(file: Lockable) -> None:
    """Wait until nobody else has a lock on an open file, and take it. Raises OSError where files cannot be locked."""
    fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: Lockable, shared: bool = False) -> bool:
    """Lock an open file if that is possible at once. `shared`: others may have such a lock, too.

    Raises OSError where files cannot be locked.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: Lockable) -> None:
    """End the lock at once, also where a process that has inherited the open file goes on."""
    fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(file: Lockable) -> bool:
    """Whether another process has a lock that nobody shares."""
    if not try_lock(file, shared=True):
        return True
    unlock(file)
    return False


class OwnedFile:
    """A file to lock, whose content says who has done so. It may be deleted at any time, and is made again."""

    def __init__(self, path: Path):
        self._path = path
        self.fd = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def try_lock(self, owner: str) -> bool:
        """Lock the file and write the owner into it, if nobody has locked it."""
        self._reopen_if_deleted()
        if not try_lock(self.fd):
            return False
        # If the disk is full, the lock counts all the same.
        with suppress(OSError):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, owner.encode("utf-8", "surrogateescape"), 0)
        return True

    def unlock(self) -> None:
        with suppress(OSError):
            os.ftruncate(self.fd, 0)
        unlock(self.fd)

    def is_locked(self) -> bool:
        self._reopen_if_deleted()
        return is_locked(self.fd)

    def owner(self) -> str:
        """The text of the process that has locked it, or of the last one if that was killed."""
        return os.pread(self.fd, 1 << 16, 0).decode("utf-8", "replace")

    def _reopen_if_deleted(self) -> None:
        """A program that cleans temporary folders may have deleted the file: other runs would lock another one."""
        with suppress(OSError):
            if not os.path.exists(self._path) or not os.path.samestat(os.stat(self._path), os.fstat(self.fd)):
                new = self._open()
                os.close(self.fd)
                self.fd = new

    def close(self) -> None:
        os.close(self.fd)
