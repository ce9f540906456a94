"""Reports of how each rank ended, from its own account and its exit status."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.raw import RawRecord, agree
from torch_testing_ext._collectives.records import RankRecord, Site
from torch_testing_ext._process.logs import cut
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
    recorder: RankRecord | None = None  # the collectives that it left, or that it reported while it was still running
    leftovers: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    memory: tuple[tuple[int, int, int], ...] = ()  # the most that it has had on each device: see device_memory.py
    issued: RankRecord | None = None  # all that it issued, from the log of a rank that is sanitized
    found: tuple[Finding, ...] = ()  # what the sanitizer has found in this rank
    cause: Cause = Cause.OWN  # of an error
    warnings: tuple[OwnWarning, ...] = ()
    extras: str = ""  # for the test framework of the parent, from its part in the rank
    sites: tuple[Site, ...] = ()  # the lines through which its exception came, outermost first
    details: str = ""  # all of the exception's message
    related: tuple[str, ...] = ()  # a line for each exception that it contains, or was raised after
    example: str = ""  # of a property that was tried when a peer was lost
    in_flight: RankAccount | None = None  # of an exception that was in flight while it was still running

    @property
    def place_of_failure(self) -> object:
        """The place of the exception, with its type: ranks that failed there failed alike, whatever the values.

        None if the place is not known.
        """
        return (self.ending, self.summary.partition(":")[0], self.sites) if self.sites else None

    def line(self) -> str:
        """Describe the end of this rank in one line, without its number."""
        after = f"after {self.seconds:.2f} s"
        match self.ending:
            case RankEnding.PASSED:
                return f"passed {after}"
            case RankEnding.SKIPPED:
                return f"skipped {after}: {self.summary}"
            case RankEnding.FAILED | RankEnding.ERROR:
                by = (
                    describe_exit(self.code).removeprefix("was ")
                    if self.code == -signal.SIGABRT
                    else "ended by the parent"
                )
                then = f"; then {by}, in a `finally` or an `__exit__`" if self.in_flight else ""
                return f"{self.ending.value} {after}: {cut(without_cpp_place(self.summary), _LONGEST)}{then}"
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


_LONGEST = 160  # columns of a summary in a line of a table; the traceback has all of it
# The place in a C++ source where an error was raised: longer than the error itself.
_CPP_PLACE = re.compile(r"\[[^\]\s]+\.(cc|cpp|h|hpp):\d+\] ?")


def without_cpp_place(summary: str) -> str:
    return _CPP_PLACE.sub("", summary)


def report_of(rank: int, account: RankAccount, seconds: float = 0.0) -> RankReport:
    """The report of a rank that ended as its account says."""
    report = RankReport(
        rank,
        account.ending,
        seconds,
        account.ended,
        account.code,
        imported=account.imported,
        notes=account.notes,
        memory=account.memory,
        warnings=account.warnings,
        extras=account.extras,
    )
    return with_exception(report, account)


def with_exception(report: RankReport, account: RankAccount) -> RankReport:
    """A report of a rank that has failed, or skipped, by the exception that an account is about."""
    return replace(
        report,
        ending=account.ending,
        summary=account.summary,
        traceback=account.traceback,
        cause=account.cause,
        sites=account.sites,
        details=account.details,
        related=account.related,
        example=account.example,
    )


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
    in_time = stopped is None or account.ended <= stopped
    if in_time and (code == account.code or (stopped is not None and account.ending.is_failure)):
        return replace(report_of(rank, account, account.ended - started), code=code, leftovers=exit.leftovers)
    # The account says otherwise: the rank crashed or hung on its way out. The account is still worth showing.
    return replace(
        seen,
        summary=f"the test had {account.ending.value}" + (f": {account.summary}" if account.summary else ""),
        traceback=account.traceback,
        memory=account.memory,
        warnings=account.warnings,
        extras=account.extras,
    )


def all_passed(reports: Sequence[RankReport]) -> bool:
    return all(report.ending is RankEnding.PASSED for report in reports)


def add_recorders(reports: Sequence[RankReport], left: Sequence[RawRecord | None]) -> list[RankReport]:
    """Add the collectives that each rank left, unless all ranks passed and issued the same."""
    if all_passed(reports) and agree(left):
        return list(reports)
    return [
        replace(report, recorder=raw.record(report.rank) if raw is not None else None)
        for report, raw in zip(reports, left, strict=True)
    ]


def now() -> float:
    """Seconds on the clock that all processes of a machine share."""
    return time.monotonic()
