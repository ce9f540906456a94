"""The watcher of a run: it waits for exits, ends the ranks that do not end, and collects a report of every rank.

It waits for exits, and for time only at deadlines. A `RankWatch` decides what follows from both; the code here does it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.records.raw_records import RawRecord
from torch_testing_ext._process import system
from torch_testing_ext._tests.notes import note_memory
from torch_testing_ext.launch import start, terminal_turns
from torch_testing_ext.launch.accounts import RankEnding, now
from torch_testing_ext.launch.fork_server_client import Run
from torch_testing_ext.launch.fork_server_messages import Preload
from torch_testing_ext.launch.rank_reports import RankReport
from torch_testing_ext.launch.verdict import Expected
from torch_testing_ext.launch.watching.evidence import RankEvidence
from torch_testing_ext.launch.watching.looks import Looks
from torch_testing_ext.launch.watching.rank_records import RankRecords
from torch_testing_ext.launch.watching.rules import IN_TURNS, OWN_PROCESSES, RankWatch, WatchAction

if TYPE_CHECKING:
    from torch_testing_ext.launch.nccl_status import NcclStatus

# Seconds between looks at the faults of a test.
LOOK_AT_FAULTS = 0.05
# Ranks answer in milliseconds, unless they hold the GIL or the machine is loaded.
BETWEEN_READS, ANSWER_TIMEOUT = 0.03, 1.0


def watch(
    run: Run,
    timeout: float | None,
    expected: Expected,
    on_timeout: Callable[[], None] = lambda: None,
    records: RankRecords | None = None,
) -> RankEvidence:
    """Watch a run until it has ended. At the time-out, `on_timeout` is called before the running ranks are ended.

    Without a time-out, as in a debugger, the ranks are not probed. `records`: those of this run, to know more of it.
    """
    watcher = RankWatcher(run, expected, run.began, timeout, records=records)
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
            start.finish(run)
    notes = [run.job.sanitize.note] if run.job.sanitize is not None else []
    if watcher.state.timed_out and watcher.looks.doubt:
        notes.append(f"A deadlock could not be proven: {watcher.looks.doubt}")
    evidence = watcher.evidence("\n\n".join(filter(None, notes)))
    final = [report.final_account for report in evidence.reports]
    imported = max((account.imported for account in final if account is not None), key=len, default=())
    start.launcher().add_preload_hints(run, imported)
    return evidence


def end_run(run: Run) -> None:
    """End a run whose result is no longer needed."""
    RankWatcher(run, Expected(), run.began).end_all()
    start.finish(run)


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
        self.records = records or RankRecords(run, began)
        self.plan = self.records.plan
        if self.plan is not None:
            expected = replace(expected, faults=self.plan)
        self.expected = expected
        # Ranks in turns wait for nobody.
        are_in_turns = run.job.at_once is not None
        rules = IN_TURNS if are_in_turns else OWN_PROCESSES
        self.state = RankWatch(range(len(run.pids)), rules, expected, began, timeout, run.waiting)
        endless = None if timeout is None or are_in_turns else endless or timeout
        self.looks = Looks(run, expected, self.records.logs, endless)
        # What NCCL says of ranks that hang.
        self.nccl: NcclStatus | None = None
        # The moment at which a rank was last in the debugger.
        self._last_pause = 0.0
        # A fault has happened, after which the test has less time.
        self._is_limited = False

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
        while True:
            # Also the ends that were received while this process waited for something else, as for the next rank.
            while self.take_endings():
                self._on_news(now())
            step = self.state.step(reached)
            if step.action is WatchAction.LOOK:
                self._look()
            elif step.action is not WatchAction.WAIT:
                return
            elif not self.run.wait_for_event(self._until(step.until)) and not self._was_paused():
                self._look_at_faults()
                reached = now()

    def take_endings(self) -> bool:
        """Take the ends of ranks since the last call. Returns whether ranks ended, or began: then more may have."""
        ranks = self.records.take_new()
        restarting = []
        for rank in ranks:
            report, at = self.records.report(rank), self.records.exit_of(rank).at
            self.state.on_end(report, at)
            if report.ending is RankEnding.FAULT and self.records.may_restart(rank):
                restarting.append(rank)
        self._take_exits()
        for rank in restarting:
            self.records.on_restart(rank)
            self.run.restart(rank, self.records.restarted[rank])
            self.state.on_restart(rank)
            # The log of its first process is not that of its calls now.
            self.looks.give_up()
            self.state.look_due = None
        return self._begin_turns(ranks) or bool(ranks)

    def _begin_turns(self, ended: Sequence[int]) -> bool:
        """Start the ranks whose turn comes with the ends of others. Returns whether there were any."""
        if self.state.stop is not None or self.run.lost:
            return False
        if 0 in ended and self.state.waiting:
            first = self.records.accounts[0]
            # Each of them would import these modules.
            self.run.server.send(Preload(first.imported if first is not None else (), at_once=True))
        before = len(self.state.waiting)
        while self.state.waiting and len(self.run.alive) < (self.run.job.at_once or 0):
            self.state.on_turn(self.run.start_next(), now())
        return len(self.state.waiting) < before

    def _take_exits(self) -> None:
        gone = self.state.alive.difference(self.run.alive)
        for rank in gone | self.state.waiting if self.run.lost else gone:
            self.state.on_exit(rank)

    # -- faults of the test

    def _until(self, until: float | None) -> float | None:
        """The time to look at the faults, which only the logs tell as long as a rank lives."""
        is_limited = self.plan is None or self.plan.within is None or self._is_limited
        if is_limited and not self._may_be_frozen():
            return until
        soon = now() + LOOK_AT_FAULTS
        return soon if until is None else min(soon, until)

    def _look_at_faults(self) -> None:
        """Limit the time of the test after the first fault, and end ranks that nobody is left to heal."""
        if self.plan is not None and self.plan.within is not None and not self._is_limited:
            seen = [self.records.faults_seen(rank, self.plan) for rank in self.plan.victims]
            moments = [happened.at for of_rank in seen for happened in of_rank.happened]
            if moments:
                self._is_limited = True
                self.state.limit(min(moments) + self.plan.within)
        if not self._may_be_frozen():
            return
        frozen = [rank for rank in self.pending if self.records.is_stopped_by_fault(rank)]
        if len(frozen) == len(self.pending):
            self._kill_frozen(frozen)

    def _may_be_frozen(self) -> bool:
        running = self.state.running
        return self.plan is not None and bool(self.plan.faults and running) and running <= self.plan.stopped_for_good

    def _kill_frozen(self, ranks: Sequence[int]) -> None:
        """End ranks that a fault has stopped. They would get SIGTERM when they go on."""
        for rank in ranks:
            self.records.frozen.add(rank)
            self.run.signal(signal.SIGKILL, rank)

    def _on_news(self, at: float) -> None:
        self.looks.on_news(at)
        self.state.look_due = self.looks.due

    def _was_paused(self) -> bool:
        """Whether a rank is in the debugger, or was since the last call. Then the time begins again."""
        if not self.run.job.terminal.path:
            return False
        last = terminal_turns.latest(self.run.job.directory)
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
        ranks = [rank for rank in self.pending if not self.records.is_stopped_by_fault(rank)]
        self.records.found_stopped.update(rank for rank in ranks if system.is_stopped(self.run.pids[rank]))
        if self.state.timed_out:
            self._ask_before_stacks(ranks)
        self.run.dump(self.state.stacks_timeout, ranks)

    def _ask_before_stacks(self, ranks: Sequence[int]) -> None:
        """Note what ranks wait in, if some of them give no answer: the request for stacks may let those go on."""
        since = now()
        until = since + ANSWER_TIMEOUT
        answers: dict[int, RawRecord] = {}
        self.run.probe(ranks)
        while len(answers) < len(ranks) and now() < until:
            self.run.wait_for_event(min(now() + BETWEEN_READS, until))
            answers = self.records.answers_since(ranks, since)
        if answers and len(answers) < len(ranks):
            self.records.before_stacks = {rank: answers.get(rank) for rank in ranks}

    def _ask_nccl(self) -> None:
        """Ask NCCL about ranks that hang, while they are there. It takes no time where they have not used NCCL."""
        if self.state.timed_out or self.looks.finding is not None:
            from torch_testing_ext.launch.nccl_status import ask_nccl

            self.nccl = ask_nccl(self.run.job.context.environ)

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
        self._kill_frozen([rank for rank in self.pending if self.records.is_stopped_by_fault(rank)])
        self.records.stopped.update(dict.fromkeys(self.pending, began))
        # Some may have ended by themselves meanwhile.
        while self.run.alive and self.run.wait_for_event(began):
            pass
        if self.run.alive:
            self.run.signal(signal.SIGTERM)
            self.state.on_terminated(now())

    def evidence(self, note: str) -> RankEvidence:
        """Return all that is known, when the ranks have ended. `note`: what must be known to run the test again."""
        reports = tuple(self._with_nccl(report) for report in self.records.reports())
        note_memory({report.rank: report.account.memory for report in reports if report.account is not None})
        reports = tuple(replace(r, was_stopped=r.rank in self.records.found_stopped) for r in reports)
        return RankEvidence(reports, self.state.timed_out, self.expected, self.looks.finding, note)

    def _with_nccl(self, report: RankReport) -> RankReport:
        if self.nccl is None:
            return report
        return replace(report, nccl=self.nccl.processes.get(self.run.pids[report.rank]))
