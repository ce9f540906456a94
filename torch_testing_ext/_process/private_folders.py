"""Folders of ours in places that others share, such as /tmp, and the names of sockets there.

Imports nothing of this package: nodes get it, too.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

Folder = TypeVar("Folder", str, Path)

LOCK = ".in-use"
# The address of a Unix socket may be this long on every platform.
_LONGEST_ADDRESS = 100
# Seconds after which an empty folder without a lock is one of a process that was killed.
STALE_FOLDER_AGE = 3600.0


class UnsafeFolder(Exception):
    """A folder of ours could be under the control of another user."""


def make_private(folder: Folder, refused: int = 0o022) -> Folder:
    """Create a folder for this user alone, or check that the one with its name is this user's, and no link.

    `refused`: the rights that others must not have. Raises UnsafeFolder, or OSError.
    """
    with suppress(FileExistsError):
        os.makedirs(folder, 0o700)
    status = os.lstat(folder)
    if not _is_own_folder(status):
        raise UnsafeFolder(f"{folder} is not a folder of this user")
    if status.st_mode & refused:
        done = "written to" if status.st_mode & 0o022 else "entered"
        raise UnsafeFolder(f"{folder} can be {done} by other users")
    return folder


def _is_own_folder(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


@contextmanager
def socket_name(path: str) -> Iterator[str]:
    """A name for the address of a Unix socket at a path. If that is too long: through a descriptor of its folder, or
    where the system shows none, through a link."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield path
        return
    if not os.path.isdir("/proc/self/fd"):
        with tempfile.TemporaryDirectory(dir="/tmp") as short:
            link = os.path.join(short, "link")
            os.symlink(os.path.dirname(os.path.abspath(path)), link)
            yield os.path.join(link, os.path.basename(path))
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


@contextmanager
def locked_folder(prefix: str, base: str | None = None) -> Iterator[Path]:
    """A temporary folder that is in use while this process lives; removes those that are not in use any more."""
    folder, fd = make_locked(prefix, base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def make_locked(prefix: str, base: str | None = None) -> tuple[Path, int]:
    """Create a temporary folder and a descriptor: as long as a process has that open, the folder is in use."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    draft = folder / f"{LOCK}-soon"
    try:
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        folder.rmdir()
        raise
    # Where files cannot be locked, nobody finds that this one is not.
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)
    # Now: a process that finds the lock finds it locked.
    os.rename(draft, folder / LOCK)
    remove_left(folder.parent, prefix)
    return folder, fd


def remove_left(base: Path, prefix: str) -> list[Path]:
    """Remove and return the folders with this prefix that nothing uses."""
    return [folder for folder in base.glob(f"{prefix}*") if _remove_unless_used(folder)]


def _remove_unless_used(folder: Path) -> bool:
    """Remove a folder that no process has locked, or an old, empty one without a lock. Returns whether it is gone."""
    with suppress(OSError):
        status = os.lstat(folder)
        if not _is_own_folder(status):
            return False
        if not (folder / LOCK).exists():
            if time.time() - status.st_mtime > STALE_FOLDER_AGE:
                # An error unless it is empty.
                folder.rmdir()
            return not folder.exists()
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)
        return not folder.exists()
    return False
