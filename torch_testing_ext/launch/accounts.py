"""How a rank ended: what it wrote itself, and what its exit status adds to that."""

from __future__ import annotations

import enum
import errno
import json
import os
import re
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

# Room kept on disk for each rank before it starts: a rank that filled the disk can still say so.
RESERVED = 16 * 1024
LONGEST_TEXT = 100_000
# An account of texts cut to this fits the room, even if each character takes 12 bytes as JSON has it.
SHORTEST_TEXT = RESERVED // 16


class RankEnding(enum.Enum):
    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"  # an assertion of the test
    ERROR = "error"  # any other exception
    EXITED = "exited"  # left without telling how the test ended
    KILLED = "killed"  # by a signal that is not ours
    STOPPED = "stopped"  # by us, while it was still running
    LOST = "lost"  # nobody knows: the process that watched it died

    @property
    def is_failure(self) -> bool:
        return self not in (RankEnding.PASSED, RankEnding.SKIPPED)


@dataclass(frozen=True)
class RankAccount:
    """What a rank says of itself, written to a file before it exits."""

    ending: RankEnding
    started: float  # time.monotonic(), one clock for all processes of a machine
    ended: float
    summary: str = ""  # one line
    traceback: str = ""
    code: int = 0  # the exit status that goes with it
    imported: tuple[str, ...] = ()  # modules of torch that the rank had to import itself
    notes: tuple[str, ...] = ()  # what else there is to tell


@dataclass(frozen=True)
class Exit:
    """What the process that waits for a rank saw: a wait status, when, and what the rank left running."""

    status: int
    at: float
    leftovers: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """As subprocess and multiprocessing give it: negative for a signal."""
        return os.waitstatus_to_exitcode(self.status)


@dataclass(frozen=True)
class RankReport:
    """Everything known of one rank at the end of a run."""

    rank: int
    ending: RankEnding
    seconds: float = 0.0  # from the start of the test to the end of this rank
    ended: float = 0.0  # on the clock that all ranks share: who was first?
    code: int | None = None  # exit code, negative for a signal; None where there is none
    summary: str = ""
    traceback: str = ""
    output: str = ""  # the last lines of what it printed
    stacks: str = ""  # taken while it was still running
    recorder: str = ""  # the flight recorder's JSON, taken while it was still running
    leftovers: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """This rank in one line, without its number."""
        after = f"after {self.seconds:.2f} s"
        match self.ending:
            case RankEnding.PASSED:
                return f"passed {after}"
            case RankEnding.SKIPPED:
                return f"skipped {after}: {self.summary}"
            case RankEnding.FAILED | RankEnding.ERROR:
                return f"{self.ending.value} {after}: {_shorten(self.summary)}"
            case RankEnding.EXITED:
                return f"exited with code {self.code} {after}, before the test finished{self._and_then()}"
            case RankEnding.KILLED:
                hint = " (out of memory?)" if self.code == -signal.SIGKILL else ""
                return f"killed by {signal_name(-(self.code or 0))} {after}{hint}{self._and_then()}"
            case RankEnding.STOPPED:
                itself = f" (left with code {self.code} then)" if (self.code or 0) > 0 else ""
                return f"still running {after}, ended by the parent{itself}{self._and_then()}"
            case RankEnding.LOST:
                return f"lost {after}: {self.summary}"

    def _and_then(self) -> str:
        return f"; before that: {self.summary}" if self.summary else ""


# Where in a C++ source an error came up: longer than what it says.
_CPP_PLACE = re.compile(r"\[[^\]\s]+\.(cc|cpp|h|hpp):\d+\] ?")


def _shorten(summary: str, longest: int = 160) -> str:
    """A summary that fits into a line of a table; the whole of it stands in the traceback."""
    text = _CPP_PLACE.sub("", summary)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def assemble_report(
    rank: int, account: RankAccount | None, exit: Exit, began: float, stopped: float | None
) -> RankReport:
    """One report of one rank from its own account and its exit status. The exit status has the last word.

    `stopped`: when we began to end it, if we did. What it told after that is how it took being ended."""
    code = exit.code
    started = account.started if account else began
    ending = RankEnding.STOPPED if stopped is not None else RankEnding.KILLED if code < 0 else RankEnding.EXITED
    seen = RankReport(rank, ending, exit.at - started, exit.at, code, leftovers=exit.leftovers)
    if account is None:
        return seen  # also one that left by itself when we asked it to: it would not have come to an end
    in_time = stopped is None or account.ended <= stopped
    if in_time and (code == account.code or (stopped is not None and account.ending.is_failure)):
        return replace(
            seen,
            ending=account.ending,
            seconds=account.ended - started,
            ended=account.ended,
            summary=account.summary,
            traceback=account.traceback,
            imported=account.imported,
            notes=account.notes,
        )
    # It told one end and came to another: it crashed or hung on its way out. What it told is still worth reading.
    told = f"the test had {account.ending.value}" + (f": {account.summary}" if account.summary else "")
    return replace(seen, summary=told, traceback=account.traceback)


class AccountFile:
    """The writing side of an account: one file, room reserved in advance, rewritten when there is more to say."""

    def __init__(self, fd: int):
        self.fd = fd

    @classmethod
    def open(cls, path: Path) -> AccountFile:
        pen = cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            pen._reserve()
        except OSError:
            pen.close()
            raise
        return pen

    def _reserve(self) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.fd, 0, RESERVED)

    def write(self, account: RankAccount) -> None:
        try:
            self._put(_encode(account, LONGEST_TEXT))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._put(_encode(account, SHORTEST_TEXT))

    def _put(self, data: bytes) -> None:
        # Zeros first: a rank killed in the middle of this leaves something that does not parse.
        os.pwrite(self.fd, b"\0", 0)
        view, at = data[1:], 1
        while view:
            written = os.pwrite(self.fd, view, at)
            view, at = view[written:], at + written
        os.ftruncate(self.fd, len(data))
        os.pwrite(self.fd, data[:1], 0)

    def close(self) -> None:
        os.close(self.fd)


def _encode(account: RankAccount, longest: int) -> bytes:
    fields = dict(vars(account))
    fields["ending"] = account.ending.value
    fields["summary"] = cut_middle(account.summary, longest // 4)
    fields["traceback"] = cut_middle(account.traceback, longest)
    if longest < LONGEST_TEXT:
        fields["imported"] = fields["notes"] = ()
    return json.dumps(fields).encode("ascii")


def read_account(path: Path) -> RankAccount | None:
    """The account a rank left, or None where it left none, or not a whole one."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    fields["ending"] = RankEnding(fields["ending"])
    for name in ("imported", "notes"):
        fields[name] = tuple(fields[name])
    return RankAccount(**fields)


def cut_middle(text: str, longest: int) -> str:
    """Text of bearable length; says so where it was cut."""
    if len(text) <= longest:
        return text
    half, edge = longest // 2, "\n" if "\n" in text else " "
    return f"{text[:half]}{edge}... {len(text) - 2 * half} characters cut here ...{edge}{text[-half:]}"


def tail(path: Path, lines: int = 20, longest: int = 8_000, start: int = 0) -> str:
    """The last lines of a log from `start` on, without reading all of it."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start, size - longest))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    kept = text.splitlines()[-lines:]
    return "\n".join(kept)


def now() -> float:
    return time.monotonic()
