"""Watches a run: waits for exits, ends the ranks that do not end, and collects a report of every rank.

Waits for exits, and for time only at deadlines. When a rank has failed, the others get a short grace period to report
the failure as they saw it; then the stacks of those still running are taken; then they are ended by SIGTERM, and after
another grace period by SIGKILL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.raw import unpack
from torch_testing_ext._process import grace, reaping
from torch_testing_ext._process.logs import content_of, tail, text_of

from . import client, device_memory, ras, turns
from .accounts import RankAccount, RankEnding, read_account
from .client import Run
from .job import Sanitize, log_of
from .rank_report import Exit, RankReport, add_recorders, all_passed, assemble_report, now
from .settings import read
from .verdict import Case, Expected, Outcome, Verdict, ended, nothing_to_judge

if TYPE_CHECKING:
    from torch_testing_ext._collectives.findings import Finding
    from torch_testing_ext._collectives.records import RankRecord

    from .probes import Prober
    from .sanitizer_logs import Logs

# Seconds without news until ranks that are not sanitized are looked at for the first time: when the prober is due. Most
# tests are over by then, and have not imported it.
_FIRST_LOOK = 0.75


@dataclass(frozen=True)
class WatchResult:
    """The end of a run: the reports of all ranks, and whether it timed out."""

    reports: tuple[RankReport, ...]
    timed_out: bool
    expected: Expected = field(default_factory=Expected)
    finding: Finding | None = None  # about the collectives, for which the ranks were ended
    note: str = ""  # what must be known to run it again
    nccl: str = ""  # what NCCL said of ranks that hung

    def verdict(self, case: Case) -> Verdict:
        if self.finding is None and not self.timed_out and nothing_to_judge(self.reports, self.expected):
            return Verdict(Outcome.PASSED)
        from .judging import judge  # with all that explains failures

        case = replace(case, note="\n\n".join(note for note in (case.note, self.note) if note))
        verdict = judge(self.reports, self.timed_out, case, self.expected, self.finding)
        if self.nccl and verdict.message:
            return verdict.with_note(ras.section(self.nccl))
        return verdict


def watch(
    run: Run, timeout: float | None, expected: Expected, on_timeout: Callable[[], None] = lambda: None
) -> WatchResult:
    """Watch a run until it has ended. At the time-out, `on_timeout` is called before the running ranks are ended.

    Without a time-out, as in a debugger, the ranks are not probed.
    """
    watched = RankWatcher(run, expected, run.began)
    try:
        timed_out = watched.until_over(timeout)
        if timed_out:
            on_timeout()
            watched.take_endings()
        if watched.pending:
            watched.take_stacks()
            watched.ask_nccl(timed_out)
    finally:
        # Also after Ctrl-C, or an error in this package.
        try:
            watched.end_all()
        finally:
            client.finish(run)
    note = run.job.sanitize.note if run.job.sanitize is not None else ""
    if timed_out and watched.doubt:
        note = "\n\n".join(filter(None, (note, f"A deadlock could not be proven: {watched.doubt}")))
    result = watched.result(timed_out, note)
    client.launcher().add_preload_hints(run, max((r.imported for r in result.reports), key=len, default=()))
    return result


def end(run: Run) -> None:
    """End a run whose result is no longer needed."""
    RankWatcher(run, Expected(), run.began).end_all()
    client.finish(run)


@dataclass
class Grace:
    """The time that ranks get which still run after others have ended."""

    expected: Expected
    ends: float | None = None
    has_failed: bool = False  # a rank has failed: the others end soon
    stacks_timeout: float = grace.FOR_STACKS

    def on_end(self, report: RankReport, at: float) -> None:
        """Begin a grace period if the end of this rank keeps the others from ending."""
        if report.ending is RankEnding.SKIPPED and not self.expected.codes_are_open:
            self._grant(at + grace.AFTER_SKIP)
        elif self.expected.decides(report):
            self.has_failed = True
            died = report.ending in (RankEnding.KILLED, RankEnding.EXITED)
            self.stacks_timeout = grace.FOR_STACKS_AFTER_DEATH if died else grace.FOR_STACKS
            self._grant(at + (grace.AFTER_DEATH if died else grace.AFTER_FAILURE))

    def begin_again(self, at: float) -> None:
        if self.ends is not None:
            self.ends = at + grace.AFTER_FAILURE

    def _grant(self, end: float) -> None:
        self.ends = end if self.ends is None else min(self.ends, end)


class RankWatcher:
    """Watches the ranks of a run and keeps what is known about each, since the time `began`."""

    def __init__(self, run: Run, expected: Expected, began: float):
        self.run = run
        self.expected = expected
        self.began = began
        self.accounts: dict[int, RankAccount | None] = {}
        self.answers: dict[int, Exit] = {}  # of persistent ranks that have finished their task
        self.stopped: dict[int, float] = {}  # when we began to end them
        self.grace = Grace(expected)
        self.finding: Finding | None = None
        self.doubt = ""  # what keeps a deadlock from being proven
        self.nccl = ""
        self.logs = logs_of([log_of(run.job.directory, rank) for rank in range(run.job.world_size)], run.job.sanitize)

    @property
    def pending(self) -> list[int]:
        return [rank for rank in self.run.alive if rank not in self.answers]

    def until_over(self, timeout: float | None, endless: float | None = None) -> bool:
        """Wait until no rank is pending, a grace period is over or the time is up. Returns whether it is.

        It also ends with a `finding` about the collectives. `endless`: the time-out of those that do not end by
        themselves; unless given, it is that of the test. Without a time-out, ranks are not probed.
        """
        deadline = None if timeout is None else self.began + timeout
        endless = None if timeout is None else endless or timeout
        prober, since = None, now()
        first_look = 0.0 if self.logs else _FIRST_LOOK
        stopped = 0.0
        self.take_endings()
        while self.pending:
            due = prober.due if prober is not None else since + first_look
            look = None if endless is None or self.grace.has_failed else due
            ends = [end for end in (deadline, self.grace.ends, look) if end is not None]
            if self.run.wait_for_event(min(ends, default=None)):
                known = len(self.accounts)
                self.take_endings()
                if len(self.accounts) > known:
                    since = now()
                    if prober is not None:
                        prober.on_news(since)
            elif self.run.job.terminal.path and (last := turns.latest(self.run.job.directory)) > stopped:
                # A rank is in the debugger, or was so just now: from then on, all begins again.
                stopped = since = last
                deadline = None if timeout is None else last + timeout
                self.grace.begin_again(last)
                if prober is not None:
                    prober.on_news(last)
            elif endless is not None and look == min(ends):
                prober = prober or self._prober(endless, since)
                self.finding = prober.step(now(), self.pending, self._ended())
                self.doubt = prober.doubt
                if self.finding is not None:
                    return False
            else:
                return self.grace.ends is None or (deadline is not None and deadline <= self.grace.ends)
        return False

    def _prober(self, endless: float, since: float) -> Prober:
        from torch_testing_ext._collectives.proof import ProofRules

        from .probes import Prober

        # With DETAIL, torch compares the calls itself, and a test may expect its error.
        is_checked = self.run.job.context.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
        rules = ProofRules(endless, self.expected.may_differ)
        return Prober(self.run, rules, self.logs, since, is_checked=is_checked)

    def _ended(self) -> dict[int, tuple[str, bytes]]:
        """For each rank that has ended: how, and the collectives that it left."""
        return {rank: (ended(self._report(rank)), self._left(rank)) for rank in self.accounts}

    def take_endings(self) -> None:
        for rank in self.run.exits.keys() - self.accounts.keys():
            self.accounts[rank] = self.read_account(rank)
            self.on_end(rank)

    def on_end(self, rank: int) -> None:
        self.grace.on_end(self._report(rank), self._exit(rank).at)

    def read_account(self, rank: int) -> RankAccount | None:
        """The rank's account; for one that has left by os._exit with the exit code of a skip, that of a skip."""
        account, exit = read_account(self.run.job.account(rank)), self.run.exits.get(rank)
        if account is not None or exit is None or exit.code not in self.run.job.skips:
            return account
        return RankAccount(RankEnding.SKIPPED, self.began, exit.at, self.run.job.skips[exit.code], code=exit.code)

    def take_stacks(self) -> None:
        """Take the stacks and the flight recorders of the ranks that are pending."""
        self.run.dump(self.grace.stacks_timeout, self.pending)

    def ask_nccl(self, timed_out: bool) -> None:
        """Ask NCCL about ranks that hang, while they are there. It takes no time where they have not used NCCL."""
        if timed_out or self.finding is not None:
            self.nccl = ras.ask(self.run.job.context.environ)

    def end_all(self) -> None:
        """Escalate: SIGTERM, a grace period, SIGKILL. A rank that is pending now counts as stopped, however it ends."""
        self.stopped.update(dict.fromkeys(self.pending, now()))
        reaping.escalate(self._have_ended, self.run.signal, after_sigterm=grace.AFTER_SIGTERM)
        self.run.wait_until(lambda: not self.run.alive)

    def _have_ended(self, seconds: float) -> bool:
        until = now() + seconds
        while self.run.alive and self.run.wait_for_event(until):
            pass
        return not self.run.alive

    def _exit(self, rank: int) -> Exit:
        return self.answers.get(rank) or self.run.exits[rank]

    def _report(self, rank: int) -> RankReport:
        return assemble_report(rank, self.accounts.get(rank), self._exit(rank), self.began, self.stopped.get(rank))

    def result(self, timed_out: bool, note: str) -> WatchResult:
        reports = self._reports()
        device_memory.note(reports)
        return WatchResult(reports, timed_out, self.expected, self.finding, note, self.nccl)

    def _reports(self) -> tuple[RankReport, ...]:
        ranks = range(self.run.job.world_size)
        for rank in ranks:
            if rank not in self.accounts:
                self.accounts[rank] = self.read_account(rank)
        known = self.answers.keys() | self.run.exits.keys()
        reports = [self._report(rank) if rank in known else self._lost(rank) for rank in ranks]
        quiet = all_passed(reports)
        if self.logs is not None:
            reports = self.logs.complete(reports)
            self.logs.remove()
        left = [unpack(self._left(rank)) for rank in ranks] if quiet else []
        if quiet:
            reports = add_recorders(reports, left)
        else:
            reports = [self._with_texts(replace(one, recorder=self._recorder(one.rank))) for one in reports]
        if not quiet or any(one.recorder for one in reports) or read().lanes:
            from . import lane_files

            lane_files.write(self.run.job.directory, self.run.began, reports, left)
        return tuple(reports)

    def _recorder(self, rank: int) -> RankRecord | None:
        """The collectives that a rank left, or reported when it was asked."""
        if (left := unpack(self._left(rank))) is not None:
            return left.record(rank)
        reported = unpack(content_of(self.run.job.recorder(rank)))
        # Persistent ranks have answered during earlier tests.
        return reported.record(rank) if reported is not None and reported.at >= self.began else None

    def _left(self, rank: int) -> bytes:
        """The collectives that a rank left at the end of its test."""
        account = self.accounts.get(rank)
        return account.collectives if account is not None else b""

    def log_start(self, rank: int) -> int:
        """The offset in the rank's log at which its output since `began` starts."""
        return 0

    def _with_texts(self, report: RankReport) -> RankReport:
        """Add the texts that are worth reading only if something went wrong."""
        job, rank = self.run.job, report.rank
        output = tail(job.log(rank), start=self.log_start(rank))
        if report.ending not in (RankEnding.STOPPED, RankEnding.KILLED):
            return replace(report, output=output)
        from . import hang

        in_flight = read_account(job.in_flight(rank))
        return replace(report, output=output, stacks=hang.tidy(text_of(job.stacks(rank))), in_flight=in_flight)

    def _lost(self, rank: int) -> RankReport:
        """The report if the server died. The rank's account still counts, except for a pass: it may not be final."""
        account = self.accounts[rank]
        if account is not None and account.ending is not RankEnding.PASSED:
            return assemble_report(rank, account, Exit(account.code << 8, now()), self.began, stopped=now())
        return RankReport(rank, RankEnding.LOST, now() - self.began, now(), summary=self.run.lost or "")


def logs_of(paths: Sequence[Path], sanitize: Sanitize | None) -> Logs | None:
    if sanitize is None or not sanitize.kinds:
        return None
    from .sanitizer_logs import Logs

    return Logs(paths, sanitize)
