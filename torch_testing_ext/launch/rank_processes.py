"""The start of one rank: where its output goes, and how a new interpreter becomes one."""

import os
import pickle
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from torch_testing_ext._process import interpreters
from torch_testing_ext._process.messages import LineBuffer
from torch_testing_ext.launch.accounts import AccountFile
from torch_testing_ext.launch.jobs import Job


@dataclass
class StreamedOutput:
    """Output shown as it arrives: read from a pipe, written to the log, copied to stderr line by line."""

    pipe: int
    log: int
    rank: int
    lines: LineBuffer = field(default_factory=LineBuffer)

    def copy(self) -> bytes:
        """Show the lines that are complete by the next piece of output, and return it: a loop would delay all else."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self.pipe, 1 << 16)
        _write_what_fits(self.log, data)
        for line in self.lines.add(data):
            self._print(line)
        return data

    def finish(self) -> None:
        """Show the rest: the rank has ended."""
        while self.copy():
            pass
        (unfinished,) = self.lines.add(b"\n")
        if unfinished:
            self._print(unfinished)
        self.close()

    def close(self) -> None:
        os.close(self.pipe)
        os.close(self.log)

    def _print(self, line: bytes) -> None:
        _write_what_fits(2, b"[rank%d] %s\n" % (self.rank, line))


def _write_what_fits(fd: int, data: bytes) -> None:
    """Write, ignoring errors: a full disk, or a closed pipe, must not end the process that watches the ranks."""
    with suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def open_streams(
    job: Job, rank: int, of_rank: ExitStack, of_server: ExitStack
) -> tuple[int | None, StreamedOutput | None]:
    """Open the target of a rank's stdout and stderr: its log, or a pipe to this process if they are also shown.

    The rank being debugged keeps those of this process (None), so that it has the terminal. The stacks close the
    descriptors that only the rank needs, and those that only this process needs.
    """
    if job.debug_rank == rank:
        return None, None
    log = os.open(job.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if not job.stream:
        of_rank.callback(os.close, log)
        return log, None
    of_server.callback(os.close, log)
    reading, writing = os.pipe()
    of_server.callback(os.close, reading)
    of_rank.callback(os.close, writing)
    os.set_blocking(reading, False)
    return writing, StreamedOutput(reading, log, rank)


def spawn(job: Job, rank: int, account: AccountFile, link: socket.socket, stream: int | None) -> int:
    """Start a rank as a new interpreter; returns its pid."""
    job_file = job.directory / f"job{job.incarnation}"
    if not job_file.exists():
        job_file.write_bytes(pickle.dumps(job))
    words = [str(job_file), str(rank), str(account.fd), str(link.fileno()), str(os.getpid())]
    environ = dict(job.context.environ)
    if job.differs_in_hash:
        environ["PYTHONHASHSEED"] = str(rank + 1)
    to_stream = (
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, stream, 1),
        (os.POSIX_SPAWN_DUP2, stream, 2),
    )
    for fd in (account.fd, link.fileno()):
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawn(
            sys.executable,
            interpreters.command("launch.in_rank", job.context.path, *words),
            environ,
            file_actions=to_stream if stream is not None else (),
            setsigmask=(),
        )
    finally:
        os.set_inheritable(account.fd, False)
