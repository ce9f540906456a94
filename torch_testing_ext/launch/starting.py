"""How a process comes to be: the command of a new interpreter, and where a rank's output goes."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from .job import Job
from .report import AccountFile

# Code that every interpreter we start runs before it imports what is tested; one that starts others hands it on.
FIRST_OF_ALL: list[str] = []


def command(module: str, path: Sequence[object], *words: str) -> list[str]:
    """A new interpreter of our kind that runs `main()` of a module of this kit, finding modules where we do."""
    # Python skips what is no text in sys.path; its repr might not be a literal.
    found_on = [entry for entry in path if isinstance(entry, str)]
    run = f"from torch_testing_ext.{module} import main; main()"
    code = "; ".join(["import sys", f"sys.path[:] = {found_on!r}", *FIRST_OF_ALL, run])
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", code, *words]


@dataclass
class StreamedOutput:
    """Output that is shown while it comes: read from a pipe, kept in the log, copied to stderr line by line."""

    pipe: int
    log: int
    rank: int
    unread: bytes = b""

    def copy(self) -> None:
        while data := read_available(self.pipe):
            _write(self.log, data)
            *lines, self.unread = (self.unread + data).split(b"\n")
            for line in lines:
                self._print(line)

    def finish(self) -> None:
        self.copy()
        if self.unread:
            self._print(self.unread)
        self.close()

    def close(self) -> None:
        os.close(self.pipe)
        os.close(self.log)

    def _print(self, line: bytes) -> None:
        _write(2, b"[rank%d] %s\n" % (self.rank, line))


def _write(fd: int, data: bytes) -> None:
    """All of it, or what there is room for: a full disk or a reader who left must not end who watches the ranks."""
    with suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def open_streams(job: Job, rank: int, owner: ExitStack) -> tuple[int | None, StreamedOutput | None]:
    """Where a rank's stdout and stderr go: to its log; through us, if it is to be shown as well; for the rank being
    debugged to what this process has (None), so that it has the terminal. `owner` closes what it does not pass on."""
    if job.debug_rank == rank:
        return None, None
    log = os.open(job.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    owner.callback(_close, log)
    if not job.stream:
        return log, None
    reading, writing = os.pipe()
    for fd in (reading, writing):
        owner.callback(_close, fd)
    os.set_blocking(reading, False)
    shown = StreamedOutput(os.dup(reading), os.dup(log), rank)
    return writing, shown


def _close(fd: int) -> None:
    with suppress(OSError):
        os.close(fd)


def read_available(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


def spawn(job: Job, rank: int, pen: AccountFile, theirs: socket.socket, stream: int | None) -> int:
    """Start a rank as a new interpreter; returns its pid."""
    job_file = job.directory / "job"
    if not job_file.exists():
        job_file.write_bytes(pickle.dumps(job))
    words = [str(job_file), str(rank), str(pen.fd), str(theirs.fileno()), str(os.getpid())]
    for fd in (pen.fd, theirs.fileno()):
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawn(
            sys.executable,
            command("launch.rank", job.context.path, *words),
            job.context.environ,
            file_actions=_file_actions(stream),
            setsigmask=(),
        )
    finally:
        os.set_inheritable(pen.fd, False)


def _file_actions(stream: int | None) -> list[tuple[Any, ...]]:
    if stream is None:
        return []
    return [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, stream, 1),
        (os.POSIX_SPAWN_DUP2, stream, 2),
    ]
