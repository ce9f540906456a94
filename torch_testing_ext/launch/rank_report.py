"""Reports of how each rank ended, from its own account and its exit status."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.raw import RawRecord, agree
from torch_testing_ext._process.reaping import describe_exit

from .accounts import OwnWarning, RankAccount, RankEnding
from .causes import Cause

if TYPE_CHECKING:
    from torch_testing_ext._collectives.findings import Finding


@dataclass(frozen=True)
class Exit:
    """A rank's end as seen by the process that waits for it: wait status, time, and processes left running."""

    status: int
    at: float
    leftovers: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """Return the exit code as subprocess and multiprocessing give it: negative for a signal."""
        return os.waitstatus_to_exitcode(self.status)


@dataclass(frozen=True)
class RankReport:
    """Everything known about one rank at the end of a run."""

    rank: int
    ending: RankEnding
    seconds: float = 0.0  # from the start of the test to the end of this rank
    ended: float = 0.0  # on the clock that all ranks share, to find which rank was first
    code: int | None = None  # exit code, negative for a signal; None if there is none
    summary: str = ""
    traceback: str = ""
    output: str = ""  # the last lines that it printed
    stacks: str = ""  # taken while it was still running
    recorder: str = ""  # the collectives that it left, or that it reported while it was still running
    leftovers: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    memory: tuple[tuple[int, int, int], ...] = ()  # the most that it has had on each device: see device_memory.py
    issued: str = ""  # all that it issued, from the log of a rank that is sanitized
    found: tuple[Finding, ...] = ()  # what the sanitizer has found in this rank
    cause: Cause = Cause.OWN  # of an error
    warnings: tuple[OwnWarning, ...] = ()
    extras: str = ""  # for the test framework of the parent, from its part in the rank

    def line(self) -> str:
        """Describe the end of this rank in one line, without its number."""
        after = f"after {self.seconds:.2f} s"
        match self.ending:
            case RankEnding.PASSED:
                return f"passed {after}"
            case RankEnding.SKIPPED:
                return f"skipped {after}: {self.summary}"
            case RankEnding.FAILED | RankEnding.ERROR:
                return f"{self.ending.value} {after}: {_shorten(self.summary)}"
            case RankEnding.EXITED:
                return f"{describe_exit(self.code, f' {after}')}, before the test finished{self._and_then()}"
            case RankEnding.KILLED:
                return describe_exit(self.code, f" {after}").removeprefix("was ") + self._and_then()
            case RankEnding.STOPPED:
                itself = f" (left with code {self.code} then)" if (self.code or 0) > 0 else ""
                return f"still running {after}, ended by the parent{itself}{self._and_then()}"
            case RankEnding.LOST:
                return f"lost {after}: {self.summary}"

    def _and_then(self) -> str:
        return f"; before that: {self.summary}" if self.summary else ""


# The place in a C++ source where an error was raised: longer than the error itself.
_CPP_PLACE = re.compile(r"\[[^\]\s]+\.(cc|cpp|h|hpp):\d+\] ?")


def _shorten(summary: str, longest: int = 160) -> str:
    """A summary that fits into a line of a table; the traceback has all of it."""
    text = _CPP_PLACE.sub("", summary)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def assemble_report(
    rank: int, account: RankAccount | None, exit: Exit, began: float, stopped: float | None
) -> RankReport:
    """The report of one rank, from its own account and its exit status. The exit status overrides the account.

    `stopped`: when we began to end the rank, if we did. An account written later shows how it reacted to that.
    """
    code = exit.code
    started = account.started if account else began
    ending = RankEnding.STOPPED if stopped is not None else RankEnding.KILLED if code < 0 else RankEnding.EXITED
    seen = RankReport(rank, ending, exit.at - started, exit.at, code, leftovers=exit.leftovers)
    if account is None:
        return seen  # also for a rank that exited by itself after SIGTERM: it would not have ended otherwise
    seen = replace(seen, memory=account.memory, warnings=account.warnings, extras=account.extras)
    in_time = stopped is None or account.ended <= stopped
    if in_time and (code == account.code or (stopped is not None and account.ending.is_failure)):
        return replace(
            seen,
            ending=account.ending,
            seconds=account.ended - started,
            ended=account.ended,
            summary=account.summary,
            cause=account.cause,
            traceback=account.traceback,
            imported=account.imported,
            notes=account.notes,
        )
    # The account says otherwise: the rank crashed or hung on its way out. The account is still worth showing.
    earlier = f"the test had {account.ending.value}" + (f": {account.summary}" if account.summary else "")
    return replace(seen, summary=earlier, traceback=account.traceback)


def all_passed(reports: Sequence[RankReport]) -> bool:
    return all(report.ending is RankEnding.PASSED for report in reports)


def add_recorders(reports: Sequence[RankReport], left: Sequence[RawRecord | None]) -> list[RankReport]:
    """Add the collectives that each rank left, unless all ranks passed and issued the same."""
    if all_passed(reports) and agree(left):
        return list(reports)
    return [
        replace(report, recorder=raw.text() if raw is not None else "")
        for report, raw in zip(reports, left, strict=True)
    ]


def now() -> float:
    """Seconds on the clock that all processes of a machine share."""
    return time.monotonic()
