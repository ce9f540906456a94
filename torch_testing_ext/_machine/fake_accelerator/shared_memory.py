"""The memory of the fake accelerators that the processes of a run use, as NVML knows it of GPUs."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from torch_testing_ext._machine.nvml import GpuProcess, Usage

# The constants of the library: a row for each process, with the bytes that it has on each device.
MOST_DEVICES = 16
_ROWS = 256
_ROW = struct.Struct(f"={MOST_DEVICES}q")
# Linux's `struct flock`: type, whence, start, length and, in an answer, the process that has the lock.
_FLOCK = struct.Struct("@hhqqi")


def uuid_of(number: int) -> str:
    """Return what identifies a device of the run."""
    return f"fake-{number:04d}"


def make_file(file: Path) -> None:
    """Make the file in which processes count their memory."""
    file.write_bytes(bytes(_ROWS * _ROW.size))


class SharedMemory:
    """Reads the file in which each process of a run counts its memory, in a row that it has locked."""

    def __init__(self, file: Path):
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def usage(self) -> Mapping[str, Usage]:
        """The use of each device, by its UUID. What a process had that has ended is free."""
        rows = _ROW.iter_unpack(os.pread(self._fd, _ROWS * _ROW.size, 0))
        used = [0] * MOST_DEVICES
        users: list[list[GpuProcess]] = [[] for _ in range(MOST_DEVICES)]
        for row, counts in enumerate(rows):
            pid = self._owner(row) if any(counts) else 0
            for number, size in enumerate(counts):
                if pid and size:
                    used[number] += size
                    users[number].append(GpuProcess(pid, size))
        return {uuid_of(number): Usage(used[number], tuple(users[number])) for number in range(MOST_DEVICES)}

    def close(self) -> None:
        """Read no more."""
        os.close(self._fd)

    def _owner(self, row: int) -> int:
        """The process that has locked a row; 0 without one."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, row, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked)[: _FLOCK.size])
        return 0 if kind == fcntl.F_UNLCK else int(pid)
