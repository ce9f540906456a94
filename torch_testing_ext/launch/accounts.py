"""Accounts: each rank records how its test ended, in a file that outlives the rank."""

from __future__ import annotations

import enum
import errno
import os
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from os import pwrite
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from torch_testing_ext._collectives.records.growth_laws import GrowthClaim
from torch_testing_ext._process import messages
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.files import file_behind
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._tests.notes import Peaks
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch.causes import Cause

# Characters of a summary. The traceback has all of the exception.
LONGEST_SUMMARY = 2_000

LONGEST_DETAILS = 8_000


def now() -> float:
    """Seconds on the clock that all processes of a machine share."""
    return monotonic()


# The exit status of a rank whose test raised; PyTorch's TEST_ERROR_EXIT_CODE.
ERROR_EXIT_CODE = 10


# Disk space reserved for each rank before it starts, so that a rank that fills the disk can still report it.
RESERVED = 16 * 1024


LONGEST_TEXT = 2_000_000


# With its texts cut to this length an account fits the reserved space, even if each character takes 12 bytes in JSON.
SHORTEST_TEXT = RESERVED // 16


_SEPARATOR = b"\0"


_PICKLE = b"\x80"  # begins every pickle


_END = _SEPARATOR + b"\n"  # and no collectives


class RankEnding(enum.Enum):
    """The end of a rank."""

    PASSED = TestOutcome.PASSED.value
    SKIPPED = TestOutcome.SKIPPED.value
    FAILED = TestOutcome.FAILED.value  # an assertion of the test
    ERROR = TestOutcome.ERROR.value  # any other exception
    EXITED = "exited"  # without a record of how the test ended
    KILLED = "killed"  # by a signal that we did not send
    STOPPED = "stopped"  # by us, while it was still running
    FAULT = "fault"  # by a fault of the test, as expected
    LOST = "lost"  # unknown: the process that watched it died
    UNSTARTED = "not started"  # others had failed before its turn came

    @property
    def is_failure(self) -> bool:
        return self not in (RankEnding.PASSED, RankEnding.SKIPPED, RankEnding.FAULT, RankEnding.UNSTARTED)


class OwnWarning(NamedTuple):
    """A warning that a rank raised while its test ran, as `warnings.warn_explicit` takes it."""

    text: str
    category: str  # module and name of its class, with a dot between
    file: str
    line: int


@dataclass(frozen=True)
class RaisedError:
    """An exception as facts, besides the line and the traceback that show it. All are empty if there is none."""

    # The name of its type; empty also if only the texts are known.
    type_name: str = ""
    cause: Cause = Cause.OWN
    # The lines through which it came, outermost first.
    sites: tuple[Site, ...] = ()
    # All of its message.
    details: str = ""
    # A line for each exception that it contains, or was raised after.
    related: tuple[str, ...] = ()
    # The example of a property that was tried when a peer was lost.
    example: str = ""

    @property
    def title(self) -> str:
        """The first line of its message."""
        return cut_middle(self.details.partition("\n")[0], LONGEST_SUMMARY)


NO_ERROR = RaisedError()


@dataclass(frozen=True)
class RankAccount:
    """A rank's own record of how its test ended, written to a file before the rank exits."""

    ending: RankEnding
    started: float  # time.monotonic(), one clock for all processes of a machine
    ended: float
    summary: str = ""  # one line
    traceback: str = ""
    code: int = 0  # the exit status that goes with it
    imported: tuple[str, ...] = ()  # modules of torch that the rank had to import itself
    notes: tuple[str, ...] = ()  # additional remarks
    memory: tuple[tuple[int, int, int], ...] = ()  # the most that it has had on each device: see verdict.py
    warnings: tuple[OwnWarning, ...] = ()
    extras: str = ""  # for the test framework of the parent, from its part in the rank
    collectives: bytes = b""  # what the rank has issued, as `pack_record` packs it
    error: RaisedError = NO_ERROR  # by which it has failed
    growth: tuple[GrowthClaim, ...] = ()  # what the test says of larger worlds


_KINDS = messages.by_name(RankAccount)


class AccountFile:
    """The writing side of an account: one file with space reserved in advance, rewritten with each new account."""

    def __init__(self, fd: int, path: Path):
        self.fd = fd
        self._path = path
        self._file = file_behind(fd)
        self._size = 0

    @classmethod
    def open(cls, path: Path) -> AccountFile:
        file = cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), path)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fd, 0, RESERVED)
        except OSError:
            file.close()
            raise
        return file

    def is_open(self) -> bool:
        """False if the test has closed the descriptor; another file may have its number by now."""
        return file_behind(self.fd) == self._file

    def reopen(self) -> None:
        self.fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, account: RankAccount) -> None:
        try:
            self._put(_encode(account, LONGEST_TEXT))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._put(_encode(account, SHORTEST_TEXT))

    def _put(self, data: bytes) -> None:
        # Invalidate the first byte until the end: if the rank is killed in between, the file does not parse. What was
        # written behind the end before stays there: to cut it off costs ranks that end together 2 ms, on ext4.
        pwrite(self.fd, b"\0", 0)
        self._write_all(data[1:] + _END, 1)
        pwrite(self.fd, data[:1], 0)
        self._size = len(data)

    def attach(self, data: bytes) -> None:
        """Write the rank's collectives behind its account, in which no NUL occurs. The next account drops them."""
        self._write_all(_SEPARATOR + data, self._size)

    def _write_all(self, data: bytes, at: int) -> None:
        while data:
            written = pwrite(self.fd, data, at)
            data, at = data[written:], at + written

    def clear(self) -> None:
        pwrite(self.fd, b"\0", 0)  # it does not parse

    def close(self) -> None:
        if self.is_open():
            os.close(self.fd)


def _encode(account: RankAccount, longest: int) -> bytes:
    summary, traceback = cut_middle(account.summary, longest // 4), cut_middle(account.traceback, longest)
    account = replace(account, summary=summary, traceback=traceback, collectives=b"")
    if longest < LONGEST_TEXT:
        error = RaisedError(account.error.type_name, account.error.cause)
        account = RankAccount(
            account.ending, account.started, account.ended, summary, traceback, account.code, error=error
        )
    return messages.to_json(account).encode("ascii")


def read_account(path: Path) -> RankAccount | None:
    """Return the account that a rank left, or None if there is none or it is incomplete."""
    try:
        text, separator, collectives = path.read_bytes().partition(_SEPARATOR)
        account: RankAccount = messages.from_json(text, _KINDS)
    except (OSError, ValueError):
        return None
    if collectives.startswith(_END[1:]):
        collectives = b""
    if separator and collectives and not collectives.startswith(_PICKLE):
        return None  # incomplete
    return replace(account, collectives=collectives)


def memory_of_this_process() -> Peaks:
    """Return the most that this process has had so far, if it has used CUDA."""
    with suppress(Exception):
        # A figure for a report: nothing depends on it.
        cuda_state = _state_of_cuda()
        if cuda_state is not None:
            return tuple((device, *peak) for device, peak in cuda_state.peak_memory().items())
    return ()


def forget_memory_of_this_process() -> None:
    """Let `of_this_process` start again: another test begins."""
    with suppress(Exception):
        cuda_state = _state_of_cuda()
        if cuda_state is not None:
            cuda_state.forget_peak_memory()


def _state_of_cuda() -> Any:
    """The module `cuda_state` of `_torch`, if this process has imported it and uses CUDA."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    return sys.modules.get("torch_testing_ext._torch.devices.cuda_state")


def pack_warning(warning: warnings.WarningMessage) -> OwnWarning:
    """Turn a recorded warning into what a message can hold."""
    category = f"{warning.category.__module__}.{warning.category.__qualname__}"
    return OwnWarning(str(warning.message), category, warning.filename, warning.lineno)
