"""The records of the ranks of a run: their accounts and ends, and the reports that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.records.raw_records import RawRecord, unpack_record
from torch_testing_ext._process import system
from torch_testing_ext._process.fork_host import Exit
from torch_testing_ext._process.logs import content_of, tail, text_of
from torch_testing_ext.launch.accounts import RankAccount, RankEnding, now, read_account
from torch_testing_ext.launch.fault_checks import with_faults
from torch_testing_ext.launch.fork_server_client import Run
from torch_testing_ext.launch.jobs import Sanitize, log_of
from torch_testing_ext.launch.rank_reports import RankReport, all_passed, assemble_report, ended
from torch_testing_ext.launch.seen_faults import FaultsSeen
from torch_testing_ext.launch.watching.evidence import with_collectives
from torch_testing_ext.launch.watching.rank_lanes import write_lanes

if TYPE_CHECKING:
    from torch_testing_ext.faults import FaultPlan
    from torch_testing_ext.launch.logs_of_ranks import Logs


class RankRecords:
    """The accounts and the ends of the ranks of a run, and the reports that follow from them."""

    def __init__(self, run: Run, began: float):
        self.run = run
        self.began = began
        self.accounts: dict[int, RankAccount | None] = {}
        # The answers of persistent ranks that have finished their task.
        self.answers: dict[int, Exit] = {}
        # The moment at which we began to end each rank that was running.
        self.stopped: dict[int, float] = {}
        # The ranks that a fault has ended, and that run again; and those that were ended while they were stopped.
        self.restarted: Counter[int] = Counter()
        self.frozen: set[int] = set()
        # The ranks that something else had stopped, and that were still so when the time was over.
        self.found_stopped: set[int] = set()
        # What the ranks that were running at the time-out answered before anything woke the others, if some did not.
        self.before_stacks: dict[int, RawRecord | None] = {}
        paths = [log_of(run.job.directory, rank) for rank in range(run.job.world_size)]
        self.logs = logs_of(paths, run.job.sanitize)

    @property
    def plan(self) -> FaultPlan | None:
        """The faults of the test."""
        return None if self.logs is None else self.logs.sanitize.faults

    def may_restart(self, rank: int) -> bool:
        """Whether the faults of the test start this rank once more."""
        return self.plan is not None and self.restarted[rank] < self.plan.restarts.count(rank)

    def on_restart(self, rank: int) -> None:
        """A rank is started again: its first end was a fault of the test."""
        self.restarted[rank] += 1
        del self.accounts[rank]

    def is_stopped_by_fault(self, rank: int) -> bool:
        if self.plan is None or rank not in self.run.alive or not system.is_stopped(self.run.pids[rank]):
            return False
        happened = self.faults_seen(rank, self.plan).happened
        return bool(happened) and happened[-1].fault.kind == "stop"

    def faults_seen(self, rank: int, plan: FaultPlan) -> FaultsSeen:
        """Read the faults that have happened to a rank, and what it has reached, also when it ran again."""
        return FaultsSeen.of([] if self.logs is None else self.logs.events(rank), plan)

    def take_new(self) -> list[int]:
        """Read the accounts of the ranks that have ended since the last call. Returns these ranks."""
        ranks = sorted(self.run.exits.keys() - self.accounts.keys())
        for rank in ranks:
            self.accounts[rank] = self.read_account(rank)
        return ranks

    def read_account(self, rank: int) -> RankAccount | None:
        """The rank's account; for one that has left by os._exit with the exit code of a skip, that of a skip."""
        account = read_account(self.run.job.account(rank))
        exit = self.run.exits.get(rank)
        if account is not None or exit is None:
            return account
        reason = self.run.job.skips.get(exit.code)
        if reason is None:
            return None
        return RankAccount(RankEnding.SKIPPED, self.began, exit.at, reason, code=exit.code)

    def exit_of(self, rank: int) -> Exit:
        return self.answers.get(rank) or self.run.exits[rank]

    def report(self, rank: int) -> RankReport:
        """The report of a rank that has ended."""
        exit, stopped = self.exit_of(rank), self.stopped.get(rank)
        report = assemble_report(rank, self.accounts.get(rank), exit, self.began, stopped)
        plan = self.plan
        if plan is None:
            return report
        seen = self.faults_seen(rank, plan)
        latest = seen.happened[-1].fault.incarnation if seen.happened else 0
        if latest < self.restarted[rank]:
            # None has happened to this process.
            return replace(report, faults=seen)
        return with_faults(report, seen, rank in self.frozen, plan)

    def ends(self) -> dict[int, tuple[str, bytes]]:
        """For each rank that has ended: how, and the collectives that it left."""
        ends = {}
        for rank in self.accounts:
            how = ended(self.report(rank))
            ends[rank] = (how, self.left(rank))
        return ends

    def reports(self) -> tuple[RankReport, ...]:
        """The reports of all ranks at the end, with the texts that are worth reading if something went wrong."""
        ranks = range(self.run.job.world_size)
        for rank in ranks:
            if rank not in self.accounts:
                self.accounts[rank] = self.read_account(rank)
        reports = [self._report_at_end(rank) for rank in ranks]
        have_passed = all_passed(reports)
        collectives = [self._collectives(rank, only_left=have_passed) for rank in ranks]
        reports = with_collectives(reports, self.logs, collectives)
        if not have_passed:
            reports = [self._with_texts(report) for report in reports]
        if not have_passed or any(report.recorder for report in reports) or self.run.job.keeps_lanes:
            self.write_lanes(reports, collectives)
        return tuple(reports)

    def write_lanes(self, reports: Sequence[RankReport], left: Sequence[RawRecord | None]) -> None:
        """Write the file from which reports draw the ranks. `left`: the records of those whose reports have none."""
        write_lanes(self.run.job.directory, self.run.began, reports, left)

    def _report_at_end(self, rank: int) -> RankReport:
        if rank in self.run.waiting:
            return RankReport(rank, RankEnding.UNSTARTED, ended=now())
        if rank not in self.answers and rank not in self.run.exits:
            return self._lost(rank)
        report = self.report(rank)
        if rank in self.before_stacks and report.ending is RankEnding.PASSED:
            # It went on only since all were asked for their stacks.
            return replace(report, ending=RankEnding.STOPPED, account=None)
        return report

    def _collectives(self, rank: int, only_left: bool) -> RawRecord | None:
        """The collectives that a rank left, or reported when it was asked."""
        if rank in self.before_stacks:
            return self.before_stacks[rank]
        left = _read_record(self.left(rank))
        if left is not None or only_left:
            return left
        # Persistent ranks have answered during earlier tests.
        return self.answers_since([rank], self.began).get(rank)

    def answers_since(self, ranks: Sequence[int], moment: float) -> dict[int, RawRecord]:
        """The collectives that ranks have reported since then."""
        answers = {}
        for rank in ranks:
            record = _read_record(content_of(self.run.job.recorder(rank)))
            if record is not None and record.at >= moment:
                answers[rank] = record
        return answers

    def left(self, rank: int) -> bytes:
        """The collectives that a rank left at the end of its test."""
        account = self.accounts.get(rank)
        return account.collectives if account is not None else b""

    def log_start(self, rank: int) -> int:
        """The offset in the rank's log at which its output since `began` starts."""
        return 0

    def _with_texts(self, report: RankReport) -> RankReport:
        job, rank = self.run.job, report.rank
        output = tail(job.log(rank), start=self.log_start(rank))
        if report.ending not in (RankEnding.STOPPED, RankEnding.KILLED):
            return replace(report, output=output)
        from torch_testing_ext.launch import hang

        stacks = hang.without_harness(text_of(job.stacks(rank)))
        in_flight = read_account(job.in_flight(rank))
        return replace(report, output=output, stacks=stacks, in_flight=in_flight)

    def _lost(self, rank: int) -> RankReport:
        """The report if the server died. The rank's account still counts, except for a pass: it may not be final."""
        account = self.accounts[rank]
        if account is not None and account.ending is not RankEnding.PASSED:
            return assemble_report(rank, account, Exit(account.code << 8, now()), self.began, stopped=now())
        return RankReport(rank, RankEnding.LOST, now() - self.began, now(), lost=self.run.lost or "")


def _read_record(data: bytes) -> RawRecord | None:
    """The record of a rank that has written one: one that has made no process group has not."""
    return unpack_record(data) if data else None


def logs_of(paths: Sequence[Path], sanitize: Sanitize | None) -> Logs | None:
    """The logs of ranks that are sanitized."""
    if sanitize is None or not sanitize.kinds:
        return None
    from torch_testing_ext.launch.logs_of_ranks import Logs

    return Logs(paths, sanitize)
