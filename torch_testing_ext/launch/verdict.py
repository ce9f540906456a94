"""The verdict on all ranks of a test, and the reports of ranks that it follows from, as data."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._collectives.records.issued_calls import RankRecord
from torch_testing_ext._collectives.records.raw_records import RawRecord, do_members_agree
from torch_testing_ext._process import notes
from torch_testing_ext._process.ends import describe_exit
from torch_testing_ext._process.fork_host import Exit as Exit
from torch_testing_ext._process.logs import cut
from torch_testing_ext._process.notes import Peaks
from torch_testing_ext._process.words import EndWords, grouped
from torch_testing_ext.faults import FaultPlan, PlannedFault
from torch_testing_ext.launch.accounts import (
    NO_ERROR,
    RaisedError,
    RankAccount,
    RankEnding,
    forget_memory_of_this_process,
)
from torch_testing_ext.launch.causes import Cause

if TYPE_CHECKING:
    from torch_testing_ext._collectives.findings.finding import Finding

    from .nccl_status import NcclRank


# --------------------------------------------------------------------------------------------------------------------
# The most device memory that the ranks of a test have had: each rank's own account says it.
#
# The process that runs tests notes what the ranks of a test say (`test_notes`), and adds it up when the test has
# ended.


class DevicePeak(NamedTuple):
    """The most memory that one test has had on one device; of several devices, on the one where that was most."""

    # Bytes in tensors.
    allocated: int
    # Bytes that torch's allocator held.
    reserved: int
    # On that device.
    processes: int = 1


def forget_memory() -> None:
    """A test begins: forget what its ranks' and this process's predecessors have had."""
    notes.forget_memory()
    forget_memory_of_this_process()


def highest(peaks: Iterable[Peaks]) -> DevicePeak | None:
    """The sum of several processes, on the device where it is largest."""
    of_processes = (peak for of_process in peaks for peak in of_process)
    by_device = grouped((device, (allocated, reserved)) for device, allocated, reserved in of_processes)
    sums = []
    for sizes in by_device.values():
        allocated = sum(size for size, _ in sizes)
        reserved = sum(size for _, size in sizes)
        sums.append(DevicePeak(allocated, reserved, len(sizes)))
    return max(sums, key=lambda peak: peak.reserved, default=None)


# --------------------------------------------------------------------------------------------------------------------
# The faults of a test that have happened to a rank, as its log tells them.


@dataclass(frozen=True)
class HappenedFault:
    """A fault that has happened to a rank. `index`: its place in the plan; `place`: such as `at all_reduce #3`."""

    index: int
    fault: PlannedFault
    place: str
    at: float

    def __str__(self) -> str:
        return f"{self.fault.did} {self.place} by the fault"


@dataclass(frozen=True)
class FaultsSeen:
    """The faults that have happened to a rank, and what it has issued and reached."""

    happened: tuple[HappenedFault, ...] = ()
    # Calls during which a fault was to happen, and which were over before.
    missed: Mapping[int, str] = field(default_factory=dict)
    # Of faults that have not happened, how often the rank has passed what they count.
    counts: Mapping[int, int] = field(default_factory=dict)
    # All that the rank has passed.
    passed: Mapping[str, int] = field(default_factory=dict)
    reached: frozenset[str] = frozenset()

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]], plan: FaultPlan) -> FaultsSeen:
        """Read the events of a rank's log."""
        happened, missed, reached = [], {}, set()
        counts: dict[int, int] = {}
        passed: dict[str, int] = {}
        for event in events:
            match event["event"]:
                case "fault":
                    index = event["fault"]
                    happened.append(HappenedFault(index, plan.faults[index], event["place"], event["at"]))
                case "missed":
                    missed[event["fault"]] = event["place"]
                case "reached":
                    reached.add(event["name"])
                case "seen":
                    counts = {int(index): number for index, number in event["counts"].items()}
                    passed = event["seen"]
        return cls(tuple(happened), missed, counts, passed, frozenset(reached))


NO_FAULTS = FaultsSeen()


def with_faults(report: RankReport, seen: FaultsSeen, is_frozen: bool) -> RankReport:
    """The report of a rank with the faults that have happened to it: an end by the latest one is expected.

    `is_frozen`: it was ended while a fault had it stopped.
    """
    report = replace(report, faults=seen)
    if not seen.happened:
        return report
    fault = seen.happened[-1].fault
    code = report.exit.code if report.exit is not None else None
    is_by_fault = fault.is_deadly and code == fault.exit_code
    if fault.kind == "raises" and report.ending in (RankEnding.FAILED, RankEnding.ERROR):
        is_by_fault = report.error.type_name == fault.error_type
    return replace(report, ending=RankEnding.FAULT) if is_by_fault or is_frozen else report


# --------------------------------------------------------------------------------------------------------------------
# Reports of how each rank ended, from its own account and its exit status.


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

    @property
    def why_failed(self) -> str:
        """The exception in a part of a line, and how the process ended if that was later."""
        error = cut(without_cpp_place(self.summary), _LONGEST)
        if self.in_flight is None:
            return error
        has_aborted = self.code == -signal.SIGABRT
        how = describe_exit(self.code, as_participle=True) if has_aborted else "terminated"
        # That no thread could be started has no line.
        where = ", in a `finally` or an `__exit__`" if self.in_flight.error.sites else ""
        return f"{error}; then {how}{where}"

    def _and_then(self) -> str:
        return f"; before that: {self.summary}" if self.summary else ""


_LONGEST = 160  # columns of a summary in a line of a table; the traceback has all of it
# The place in a C++ source where an error was raised: longer than the error itself.
_CPP_PLACE = re.compile(r"\[[^\]\s]+\.(cc|cpp|h|hpp):\d+\] ?")


def without_cpp_place(summary: str) -> str:
    return _CPP_PLACE.sub("", summary)


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


def add_recorders(reports: Sequence[RankReport], left: Sequence[RawRecord | None]) -> list[RankReport]:
    """Add the collectives that each rank left, unless all ranks passed and issued the same."""
    if all_passed(reports) and do_members_agree(left):
        return list(reports)
    return [
        replace(report, recorder=raw.record(report.rank) if raw is not None else None)
        for report, raw in zip(reports, left, strict=True)
    ]


# --------------------------------------------------------------------------------------------------------------------
# The verdict on a test: an outcome, a message and a culprit; and what a test expects of its ranks.


class Outcome(enum.Enum):
    """The outcome of a test on ranks."""

    PASSED = EndWords.PASSED
    SKIPPED = EndWords.SKIPPED
    FAILED = EndWords.FAILED  # an assertion of the test, or ranks that disagree
    ERROR = EndWords.ERROR  # an exception
    CRASHED = EndWords.CRASHED  # a rank died, or exited before the test was over
    TIMEOUT = EndWords.TIMEOUT


@dataclass(frozen=True)
class Expected:
    """The declarations of a test: exit codes, and whether its ranks may issue different collectives.

    `code`: the exit code that rank 0 must have.
    """

    any_code: bool = False
    code: int | None = None
    may_differ: bool = False
    faults: FaultPlan | None = None

    def decides(self, report: RankReport) -> bool:
        """Does this rank's ending alone make the test fail?"""
        if report.ending in (RankEnding.FAILED, RankEnding.ERROR, RankEnding.LOST, RankEnding.STOPPED):
            return True
        return report.ending.is_failure and not self.codes_are_open

    @property
    def codes_are_open(self) -> bool:
        return self.any_code or self.code is not None


@dataclass(frozen=True)
class Case:
    """The test that is judged. `rerun_command`: it runs the test alone; `file`: its source file.

    `show_command`: it shows the whole account. Without one the failure's text is the account.
    """

    name: str
    rerun_command: str = ""
    file: str = ""
    note: str = ""  # what else must be known to run it again
    show_command: str = ""
    kept_as: str = ""  # the name under which the account is to be kept for that command

    @property
    def function(self) -> str:
        return self.name.partition("[")[0].replace("::", ".").rpartition(".")[2]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a test, and the rank that caused it."""

    outcome: Outcome
    text: str = ""  # why it was skipped; what is to be said although it passed; a failure that is only a text
    culprit: int | None = None
    code: int | None = None  # the exit code of all ranks, if they skipped
    cause: Cause = Cause.OWN  # of a failure; peers are among the ranks, so it is never theirs
    failure: FailureView | None = None
    kept_as: str = ""  # the name under which the account is to be kept in a file

    @property
    def message(self) -> str:
        """The text for the user. Of a failure: one screen, or its account if no command would show that."""
        if self.failure is None:
            return self.text
        return self.failure.screen if self.failure.show_command else self.failure.account_with_notes

    @property
    def account(self) -> str:
        """All that is known of a failure."""
        return self.failure.account if self.failure is not None else ""

    def with_note(self, note: str) -> Verdict:
        """The verdict with something that was noticed besides."""
        if self.failure is not None:
            return replace(self, failure=self.failure.with_note(note))
        return replace(self, text=f"{self.text}\n\n{note}")


def without_fault(reports: Sequence[RankReport], plan: FaultPlan) -> tuple[str, tuple[int, ...]] | None:
    """Say which fault has not happened although its rank came to the end, and which rank that is; None if none."""
    for index, fault in enumerate(plan.faults):
        report = next(r for r in reports if r.rank == fault.rank)
        seen = report.faults
        if report.ending.is_failure or any(happened.index == index for happened in seen.happened):
            continue
        why = f"rank {report.rank} had ended before"
        if index in seen.missed:
            why = f"{seen.missed[index]} was over before it could: use phase='before' or 'after'"
        elif fault.at is not None and index in seen.counts:
            number = seen.counts[index]
            issued = [f"{times} {name}" for name, times in seen.passed.items()]
            why = f"rank {report.rank} came to {number} {fault.at.counted.format(s='' if number == 1 else 's')}"
            why += f" (in all: {', '.join(issued) or 'nothing'})"
        return f"{fault} did not happen: {why}", (report.rank,)
    return None


def without_recovery(reports: Sequence[RankReport], plan: FaultPlan) -> tuple[str, tuple[int, ...]] | None:
    """Say what is wrong with ranks that have passed: one came too late, or none to a line that must run."""
    for victim, fault in [(r.rank, fault) for r in reports for fault in r.faults.happened]:
        for report in reports:
            after = report.ended - fault.at
            if plan.within is not None and report.rank != victim and after > plan.within:
                late = f"rank {report.rank} ended {after:.1f} s after rank {victim} {fault}"
                return f"{late}; within={plan.within:g}", (report.rank,)
    reached = {name for r in reports for name in r.faults.reached}
    missing = [name for name in plan.must_reach if name not in reached]
    if not missing:
        return None
    others = f"; reached were {', '.join(map(repr, sorted(reached)))}" if reached else ""
    return f"no rank has reached {', '.join(map(repr, missing))}{others}", ()


def ended(report: RankReport) -> str:
    """Describe the end of a rank as a verb for a sentence."""
    verbs = {RankEnding.ERROR: "raised", RankEnding.KILLED: "was killed", RankEnding.LOST: "was lost"}
    if report.ending is RankEnding.FAULT:
        return str(report.faults.happened[-1])
    return str(verbs.get(report.ending, report.ending.value))


def is_victim(report: RankReport) -> bool:
    """Did this rank fail because another rank ended?"""
    return report.ending is RankEnding.ERROR and report.error.cause is Cause.LOST_PEER


def failed_by_itself(report: RankReport) -> bool:
    """Did this rank fail, neither as a victim nor because it was ended?"""
    return report.ending.is_failure and report.ending is not RankEnding.STOPPED and not is_victim(report)


def nothing_to_judge(reports: Sequence[RankReport], expected: Expected) -> bool:
    """Have all ranks passed, as expected, and left no collectives that differ and nothing that the sanitizer found?"""
    left = any(r.recorder or r.issued or r.found for r in reports) or expected.faults is not None
    return all_passed(reports) and not left and not expected.codes_are_open
