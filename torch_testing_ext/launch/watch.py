"""Watches a run: waits for exits, ends the ranks that do not end, and collects a report of every rank.

Waits for exits, and for time only at deadlines. `rank_watch` decides what follows from both; this module does it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.raw import RawRecord, unpack
from torch_testing_ext._process import test_notes
from torch_testing_ext._process.logs import content_of, tail, text_of

from . import client, ras, turns
from .accounts import RankAccount, RankEnding, read_account
from .client import Run
from .job import Sanitize, log_of
from .rank_evidence import RankEvidence, with_collectives
from .rank_report import Exit, RankReport, all_passed, assemble_report, now
from .rank_watch import OWN_PROCESSES, RankWatch, WatchAction
from .settings import read
from .verdict import Expected, ended

if TYPE_CHECKING:
    from torch_testing_ext._collectives.findings import Finding

    from .probes import Prober
    from .sanitizer_logs import Logs

# Seconds without news until ranks that are not sanitized are looked at for the first time: when the prober is due. Most
# tests are over by then, and have not imported it.
_FIRST_LOOK = 0.75


def watch(
    run: Run, timeout: float | None, expected: Expected, on_timeout: Callable[[], None] = lambda: None
) -> RankEvidence:
    """Watch a run until it has ended. At the time-out, `on_timeout` is called before the running ranks are ended.

    Without a time-out, as in a debugger, the ranks are not probed.
    """
    watcher = RankWatcher(run, expected, run.began, timeout)
    try:
        watcher.wait()
        if watcher.state.timed_out:
            on_timeout()
            watcher.take_endings()
        watcher.ask_ranks_that_run()
    finally:
        # Also after Ctrl-C, or an error in this package.
        try:
            watcher.end_all()
        finally:
            client.finish(run)
    notes = [run.job.sanitize.note] if run.job.sanitize is not None else []
    if watcher.state.timed_out and watcher.looks.doubt:
        notes.append(f"A deadlock could not be proven: {watcher.looks.doubt}")
    evidence = watcher.evidence("\n\n".join(filter(None, notes)))
    imported = max((report.imported for report in evidence.reports), key=len, default=())
    client.launcher().add_preload_hints(run, imported)
    return evidence


def end(run: Run) -> None:
    """End a run whose result is no longer needed."""
    RankWatcher(run, Expected(), run.began).end_all()
    client.finish(run)


class RankWatcher:
    """Watches the ranks of a run since the time `began`: does what its `state` says, and tells it what happens.

    Without a `timeout`, ranks are not probed. `endless`: the time-out of collectives that do not end by themselves;
    unless given, it is that of the test.
    """

    def __init__(
        self,
        run: Run,
        expected: Expected,
        began: float,
        timeout: float | None = None,
        endless: float | None = None,
        records: RankRecords | None = None,
    ):
        self.run = run
        self.expected = expected
        self.records = records or RankRecords(run, began)
        self.state = RankWatch(range(len(run.pids)), OWN_PROCESSES, expected, began, timeout)
        self.looks = Looks(run, expected, self.records.logs, None if timeout is None else endless or timeout)
        self.nccl = ""
        # When a rank has last been in the debugger.
        self._last_pause = 0.0

    @property
    def pending(self) -> list[int]:
        """The ranks in which the test still runs."""
        return [rank for rank in self.run.alive if rank in self.state.running]

    # -- until the test is over

    def wait(self) -> None:
        """Wait until no rank is pending, a grace period or the time is over, or the looks have a `finding`."""
        # It moves on only when nothing else has happened: an end that has come in time counts, however late it is read.
        reached = now()
        self._on_news(reached)
        self.take_endings()
        while True:
            step = self.state.step(reached)
            if step.action is WatchAction.LOOK:
                self._look()
            elif step.action is not WatchAction.WAIT:
                return
            elif self.run.wait_for_event(step.until):
                if self.take_endings():
                    self._on_news(now())
            elif not self._was_paused():
                reached = now()

    def take_endings(self) -> bool:
        """Take the ends of ranks since the last call. Returns whether there were any."""
        ranks = self.records.take_new()
        for rank in ranks:
            self.state.on_end(self.records.report(rank), self.records.exit_of(rank).at)
        self._take_exits()
        return bool(ranks)

    def _take_exits(self) -> None:
        for rank in self.state.alive.difference(self.run.alive):
            self.state.on_exit(rank)

    def _on_news(self, at: float) -> None:
        self.looks.on_news(at)
        self.state.look_due = self.looks.due

    def _was_paused(self) -> bool:
        """Is a rank in the debugger, or was it so since the last call? Then the time begins again."""
        if not self.run.job.terminal.path:
            return False
        last = turns.latest(self.run.job.directory)
        if last <= self._last_pause:
            return False
        self._last_pause = last
        self.state.on_pause(last)
        self._on_news(last)
        return True

    def _look(self) -> None:
        self.looks.look(self.pending, self.records.ends())
        self.state.look_due = self.looks.due
        if self.looks.finding is not None:
            self.state.on_finding()

    # -- the ranks that still run when the test is over

    def ask_ranks_that_run(self) -> None:
        """Take what pending ranks show: their stacks, and NCCL's own account of them."""
        if self.state.step(now()).action is WatchAction.TAKE_STACKS:
            self.take_stacks()
            self.state.on_stacks()
            self._ask_nccl()

    def take_stacks(self) -> None:
        """Take the stacks and the flight recorders of the ranks that are pending."""
        self.run.dump(self.state.stacks_timeout, self.pending)

    def _ask_nccl(self) -> None:
        """Ask NCCL about ranks that hang, while they are there. It takes no time where they have not used NCCL."""
        if self.state.timed_out or self.looks.finding is not None:
            self.nccl = ras.ask(self.run.job.context.environ)

    def end_all(self) -> None:
        """End all ranks that are left. A rank that is pending now counts as stopped, however it ends."""
        self.state.give_up()
        while True:
            self._take_exits()
            step = self.state.step(now())
            match step.action:
                case WatchAction.END:
                    self._terminate()
                case WatchAction.KILL:
                    self.run.signal(signal.SIGKILL)
                    self.state.on_killed()
                    self.run.wait_until(lambda: not self.run.alive)
                case WatchAction.WAIT:
                    self.run.wait_for_event(step.until)
                case _:
                    return

    def _terminate(self) -> None:
        began = now()
        self.records.stopped.update(dict.fromkeys(self.pending, began))
        # Some may have ended by themselves meanwhile.
        while self.run.alive and self.run.wait_for_event(began):
            pass
        if self.run.alive:
            self.run.signal(signal.SIGTERM)
            self.state.on_terminated(now())

    def evidence(self, note: str) -> RankEvidence:
        """Return all that is known, when the ranks have ended. `note`: what must be known to run the test again."""
        reports = self.records.reports()
        test_notes.note_memory(report.memory for report in reports)
        return RankEvidence(reports, self.state.timed_out, self.expected, self.looks.finding, note, self.nccl)


class Looks:
    """Looks whether the ranks of a run wait for each other, by a prober that is made for the first look.

    `endless`: the time-out of collectives that do not end by themselves; None: nobody looks.
    """

    def __init__(self, run: Run, expected: Expected, logs: Logs | None, endless: float | None):
        self.finding: Finding | None = None
        # The reason why a deadlock is not proven.
        self.doubt = ""
        self._run = run
        self._expected = expected
        self._logs = logs
        self._endless = endless
        self._prober: Prober | None = None
        self._last_news = now()

    @property
    def due(self) -> float | None:
        """The moment of the next look; None: never."""
        if self._endless is None:
            return None
        if self._prober is not None:
            return self._prober.due
        return self._last_news + (0.0 if self._logs else _FIRST_LOOK)

    def on_news(self, at: float) -> None:
        """Something has happened in the run: wait a while before the next look."""
        self._last_news = at
        if self._prober is not None:
            self._prober.on_news(at)

    def look(self, pending: Sequence[int], ends: Mapping[int, tuple[str, bytes]]) -> None:
        """Look once. `ends`: for each rank that has ended, how, and the collectives that it has left."""
        if self._prober is None:
            self._prober = self._make_prober()
        self.finding = self._prober.step(now(), pending, ends)
        self.doubt = self._prober.doubt

    def _make_prober(self) -> Prober:
        from torch_testing_ext._collectives.proof import ProofRules

        from .probes import Prober

        assert self._endless is not None
        # With DETAIL, torch compares the calls itself, and a test may expect its error.
        debug = self._run.job.context.environ.get("TORCH_DISTRIBUTED_DEBUG", "")
        is_checked = debug.upper() == "DETAIL"
        rules = ProofRules(self._endless, self._expected.may_differ)
        return Prober(self._run, rules, self._logs, self._last_news, is_checked=is_checked)


class RankRecords:
    """The accounts and the ends of the ranks of a run, and the reports that follow from them."""

    def __init__(self, run: Run, began: float):
        self.run = run
        self.began = began
        self.accounts: dict[int, RankAccount | None] = {}
        # Of persistent ranks that have finished their task.
        self.answers: dict[int, Exit] = {}
        # When we began to end each rank that was running.
        self.stopped: dict[int, float] = {}
        paths = [log_of(run.job.directory, rank) for rank in range(run.job.world_size)]
        self.logs = logs_of(paths, run.job.sanitize)

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
        return assemble_report(rank, self.accounts.get(rank), self.exit_of(rank), self.began, self.stopped.get(rank))

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
        reports = [self.report(rank) if self._has_ended(rank) else self._lost(rank) for rank in ranks]
        have_passed = all_passed(reports)
        collectives = [self._collectives(rank, only_left=have_passed) for rank in ranks]
        reports = with_collectives(reports, self.logs, collectives)
        if not have_passed:
            reports = [self._with_texts(report) for report in reports]
        if not have_passed or any(report.recorder for report in reports) or read().lanes:
            from . import lane_files

            lane_files.write(self.run.job.directory, self.run.began, reports, collectives)
        return tuple(reports)

    def _has_ended(self, rank: int) -> bool:
        return rank in self.answers or rank in self.run.exits

    def _collectives(self, rank: int, only_left: bool) -> RawRecord | None:
        """The collectives that a rank left, or reported when it was asked."""
        left = unpack(self.left(rank))
        if left is not None or only_left:
            return left
        reported = unpack(content_of(self.run.job.recorder(rank)))
        # Persistent ranks have answered during earlier tests.
        return reported if reported is not None and reported.at >= self.began else None

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
        from . import hang

        stacks = hang.tidy(text_of(job.stacks(rank)))
        in_flight = read_account(job.in_flight(rank))
        return replace(report, output=output, stacks=stacks, in_flight=in_flight)

    def _lost(self, rank: int) -> RankReport:
        """The report if the server died. The rank's account still counts, except for a pass: it may not be final."""
        account = self.accounts[rank]
        if account is not None and account.ending is not RankEnding.PASSED:
            return assemble_report(rank, account, Exit(account.code << 8, now()), self.began, stopped=now())
        return RankReport(rank, RankEnding.LOST, now() - self.began, now(), summary=self.run.lost or "")


def logs_of(paths: Sequence[Path], sanitize: Sanitize | None) -> Logs | None:
    """The logs of ranks that are sanitized."""
    if sanitize is None or not sanitize.kinds:
        return None
    from .sanitizer_logs import Logs

    return Logs(paths, sanitize)
