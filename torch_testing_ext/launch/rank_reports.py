"""Reports of how each rank ended, from its own account and its exit status."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.records.growth_laws import GrowthClaim
from torch_testing_ext._collectives.records.issued_calls import RankRecord
from torch_testing_ext._collectives.records.raw_records import RawRecord, do_members_agree
from torch_testing_ext._process.ends import describe_exit
from torch_testing_ext._process.fork_host import Exit as Exit
from torch_testing_ext._process.logs import cut
from torch_testing_ext._torch.signs.error_texts import without_cpp_place
from torch_testing_ext.launch.accounts import NO_ERROR, RaisedError, RankAccount, RankEnding
from torch_testing_ext.launch.causes import Cause

if TYPE_CHECKING:
    from torch_testing_ext._collectives.findings.finding import Finding
    from torch_testing_ext.launch.nccl_status import NcclRank
from torch_testing_ext.launch.seen_faults import NO_FAULTS, FaultsSeen, HappenedFault


@dataclass(frozen=True)
class RankReport:
    """Everything known about one rank at the end of a run: its own account, its exit, and what else was seen of it."""

    rank: int
    ending: RankEnding
    seconds: float = 0.0  # from the start of the test to the end of this rank
    ended: float = 0.0  # on the clock that all ranks share, to find which rank was first
    account: RankAccount | None = None  # its own; None if it left none
    exit: Exit | None = None  # of its process; None if that is not known, or goes on
    lost: str = ""  # why nothing is known of its end
    output: str = ""  # the last lines that it printed
    stacks: str = ""  # taken while it was still running
    was_stopped: bool = False  # by a signal that no fault of the test has sent, when the time was over
    recorder: RankRecord | None = None  # the collectives that it left, or that it reported while it was still running
    issued: RankRecord | None = None  # all that it issued, from the log of a rank that is sanitized
    found: tuple[Finding, ...] = ()  # what the sanitizer has found in this rank
    nccl: NcclRank | None = None  # what NCCL says of it, while it was still running
    in_flight: RankAccount | None = None  # of an exception that was in flight while it was still running
    faults: FaultsSeen = NO_FAULTS  # of the test that have happened to it, and what else shows what it has done

    @property
    def final_account(self) -> RankAccount | None:
        """The account, if the rank has ended as it says: it may have crashed or hung on its way out."""
        return self.account if self.account is not None and self.account.ending is self.ending else None

    @property
    def claims(self) -> tuple[GrowthClaim, ...]:
        """The claims of its test about larger worlds."""
        return self.account.growth if self.account is not None else ()

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None if there is none."""
        if self.exit is not None:
            return self.exit.code
        return self.account.code if self.account is not None else None

    @property
    def leftovers(self) -> tuple[str, ...]:
        """The processes that it left running."""
        return self.exit.leftovers if self.exit is not None else ()

    @property
    def summary(self) -> str:
        """One line about the end of its test, as far as it is known."""
        if self.account is None or self.lost:
            return self.lost
        if self.final_account is not None:
            return self.account.summary
        # The account says otherwise, but is still worth showing.
        before = f"the test had {self.account.ending.value}"
        return f"{before}: {self.account.summary}" if self.account.summary else before

    @property
    def traceback(self) -> str:
        return self.account.traceback if self.account is not None else ""

    @property
    def error(self) -> RaisedError:
        """The exception by which it has failed."""
        return self.final_account.error if self.final_account is not None else NO_ERROR

    @property
    def place_of_failure(self) -> object:
        """The place of the exception, with its type: ranks that failed there failed alike, whatever the values.

        None if the place is not known.
        """
        return (self.ending, self.error.type_name, self.error.sites) if self.error.sites else None

    @property
    def uncaught_fault(self) -> HappenedFault | None:
        """The fault whose exception has failed the rank: it should have caught that."""
        if not self.faults.happened or self.ending not in (RankEnding.FAILED, RankEnding.ERROR):
            return None
        happened = self.faults.happened[-1]
        is_it = happened.fault.kind == "raises" and self.error.type_name == happened.fault.error_type
        return happened if is_it else None

    def line(self) -> str:
        """Describe the end of this rank in one line, without its number."""
        after = f"after {self.seconds:.2f} s"
        match self.ending:
            case RankEnding.PASSED:
                return f"passed {after}"
            case RankEnding.SKIPPED:
                return f"skipped {after}: {self.summary}"
            case RankEnding.FAILED | RankEnding.ERROR:
                return f"{self.ending.value} {after}: {self.why_failed}"
            case RankEnding.EXITED:
                return f"{describe_exit(self.code, f' {after}')}, before the test finished{self._and_then()}"
            case RankEnding.KILLED:
                return describe_exit(self.code, f" {after}", as_participle=True) + self._and_then()
            case RankEnding.FAULT:
                return f"{self.faults.happened[-1]} {after}"
            case RankEnding.STOPPED:
                itself = f" (it exited with code {self.code})" if (self.code or 0) > 0 else ""
                return f"still running {after}, terminated{itself}{self._and_then()}"
            case RankEnding.LOST:
                return f"lost {after}: {self.summary}"
            case RankEnding.UNSTARTED:
                return str(self.ending.value)

    @property
    def why_failed(self) -> str:
        """The exception in a part of a line, and how the process ended if that was later."""
        error = cut(without_cpp_place(self.summary), _LONGEST)
        if self.in_flight is None:
            return error
        has_aborted = self.code == -signal.SIGABRT
        how = describe_exit(self.code, as_participle=True) if has_aborted else "terminated"
        # The error of a thread that could not start has no line.
        where = ", in a `finally` or an `__exit__`" if self.in_flight.error.sites else ""
        return f"{error}; then {how}{where}"

    def _and_then(self) -> str:
        return f"; before that: {self.summary}" if self.summary else ""


_LONGEST = 160  # columns of a summary in a line of a table; the traceback has all of it


def report_of(rank: int, account: RankAccount, seconds: float = 0.0) -> RankReport:
    """The report of a rank that ended as its account says."""
    return RankReport(rank, account.ending, seconds, account.ended, account)


def assemble_report(
    rank: int, account: RankAccount | None, exit: Exit, began: float, stopped: float | None
) -> RankReport:
    """The report of one rank, from its own account and its exit status. The exit status overrides the account.

    `stopped`: when we began to end the rank, if we did. An account written later shows how it reacted to that.
    """
    code = exit.code
    started = account.started if account else began
    if account is not None:
        in_time = stopped is None or account.ended <= stopped
        if in_time and (code == account.code or (stopped is not None and account.ending.is_failure)):
            return replace(report_of(rank, account, account.ended - started), exit=exit)
    # Also for a rank that exited by itself after SIGTERM: it would not have ended otherwise.
    ending = RankEnding.STOPPED if stopped is not None else RankEnding.KILLED if code < 0 else RankEnding.EXITED
    return RankReport(rank, ending, exit.at - started, exit.at, account, exit)


def all_passed(reports: Sequence[RankReport]) -> bool:
    return all(report.ending is RankEnding.PASSED for report in reports)


def any_claims(reports: Sequence[RankReport]) -> bool:
    """Whether a rank has claimed something about larger worlds."""
    return any(report.claims for report in reports)


def add_recorders(reports: Sequence[RankReport], left: Sequence[RawRecord | None]) -> list[RankReport]:
    """Add the collectives that each rank left, unless all ranks passed and issued the same."""
    if all_passed(reports) and do_members_agree(left):
        return list(reports)
    return [
        replace(report, recorder=raw.record(report.rank) if raw is not None else None)
        for report, raw in zip(reports, left, strict=True)
    ]


def ended(report: RankReport) -> str:
    """Describe the end of a rank as a verb for a sentence."""
    verbs = {RankEnding.ERROR: "raised", RankEnding.KILLED: "was killed", RankEnding.LOST: "was lost"}
    if report.ending is RankEnding.FAULT:
        return str(report.faults.happened[-1])
    return str(verbs.get(report.ending, report.ending.value))


def is_victim(report: RankReport) -> bool:
    """Whether this rank failed because another rank ended."""
    return report.ending is RankEnding.ERROR and report.error.cause is Cause.LOST_PEER


def failed_by_itself(report: RankReport) -> bool:
    """Whether this rank failed, neither as a victim nor because it was ended."""
    return report.ending.is_failure and report.ending is not RankEnding.STOPPED and not is_victim(report)


def records_of(reports: Sequence[RankReport]) -> list[RankRecord]:
    """The records of the ranks, from their logs if they were sanitized."""
    logged = [
        replace(r.issued, living=r.recorder.living) if r.recorder is not None else r.issued
        for r in reports
        if r.issued is not None
    ]
    return logged or [r.recorder for r in reports if r.recorder is not None]
