"""Watches a run until all ranks have ended, and collects what is known of each."""

from __future__ import annotations

import enum
import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.lanes_of_ranks import LANES_FILE, RankLane
from torch_testing_ext._collectives.records.issued_calls import calls_of
from torch_testing_ext._collectives.records.raw_records import RawRecord, unpack_record
from torch_testing_ext._process import messages, system
from torch_testing_ext._process.ends import AFTER_SIGTERM
from torch_testing_ext._process.logs import content_of, tail, text_of
from torch_testing_ext._process.notes import note_memory
from torch_testing_ext.faults import FaultPlan
from torch_testing_ext.launch import grace_periods

from . import start, terminal_turns
from .environment import read_settings
from .in_rank import Sanitize, log_of
from .nccl_status import NcclStatus, ask_nccl
from .own_report import RankAccount, RankEnding, now, read_account
from .start import Run
from .verdict import (
    Case,
    Exit,
    Expected,
    FaultsSeen,
    Outcome,
    RankReport,
    Verdict,
    add_recorders,
    all_passed,
    assemble_report,
    ended,
    nothing_to_judge,
    with_faults,
)

if TYPE_CHECKING:
    from torch_testing_ext._collectives.findings.finding import Finding

    from .probes import Logs, Prober


# --------------------------------------------------------------------------------------------------------------------
# The file beside the logs of the ranks from which reports draw when each rank ran, and what it issued then.


def write_lanes(directory: Path, asked: float, reports: Sequence[RankReport], left: Sequence[RawRecord | None]) -> None:
    """Write the lanes of the ranks. `left`: the records of those whose reports have none."""
    epoch = time.time() - now()
    lanes = []
    for report, raw in zip(reports, left, strict=True):
        record = report.recorder
        if record is None and raw is not None:
            record = raw.record(report.rank)
        ended = epoch + report.ended
        began = ended - report.seconds
        issued = calls_of(record, len(reports)) if record is not None and record.calls else ()
        calls = tuple(call for call in issued if call.at >= began)
        lanes.append(RankLane(report.rank, epoch + asked, began, ended, report.ending.value, calls))
    with suppress(OSError):
        # A full disk is no failure of the test.
        (directory / LANES_FILE).write_text(json.dumps(messages.encode(lanes)))


def read_lanes(file: Path) -> tuple[RankLane, ...]:
    """The lanes of a file; none if it is damaged."""
    try:
        written = json.loads(file.read_bytes())
        lanes: tuple[RankLane, ...] = messages.decode(tuple[RankLane, ...], written)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    return lanes


# --------------------------------------------------------------------------------------------------------------------
# The evidence on which a test is judged: what is known about its ranks when they have ended.


@dataclass(frozen=True)
class RankEvidence:
    """The reports of all ranks of a test, and what else its verdict depends on."""

    reports: tuple[RankReport, ...]
    timed_out: bool = False
    expected: Expected = field(default_factory=Expected)
    # About the collectives: the ranks were ended for it.
    finding: Finding | None = None
    # What must be known to run the test again.
    note: str = ""

    def verdict(self, case: Case) -> Verdict:
        """Judge the test."""
        is_certain = self.finding is None and not self.timed_out
        if is_certain and nothing_to_judge(self.reports, self.expected):
            return Verdict(Outcome.PASSED)
        from .judging import judge  # with all that explains failures

        note = "\n\n".join(filter(None, (case.note, self.note)))
        return judge(self.reports, self.timed_out, replace(case, note=note), self.expected, self.finding)


def with_collectives(
    reports: Sequence[RankReport], logs: Logs | None, left: Sequence[RawRecord | None]
) -> list[RankReport]:
    """The reports with the collectives of the ranks: from the logs of ranks that are sanitized, and what each has left.

    The logs are removed: nothing more is to be read.
    """
    if logs:
        reports = logs.complete(reports)
        logs.remove()
    return add_recorders(reports, left)


# --------------------------------------------------------------------------------------------------------------------
# Decides what follows for the ranks of a test, from how they end and from the time. Pure: no clock, process or I/O.
#
# Five drivers report events to a `RankWatch` and do what its steps say: `watch`, `persistent_ranks` and `coordinator`
# for processes, `_testing/bases/multi_process` for processes of multiprocessing, `_testing/bases/threaded_ranks` for
# threads.
#
# When a rank has failed, the others get a short grace period to report the failure as they saw it. Then the stacks of
# those still running are taken. Then they are ended by SIGTERM, and after another grace period by SIGKILL.


@dataclass(frozen=True)
class WatchRules:
    """The seconds that ranks get which still run after another has ended, and what is done with them after that."""

    after_failure: float
    after_death: float
    # None: a rank that skips does not limit the time of the others.
    after_skip: float | None = None
    # None: ranks that are lost are not named before the verdict.
    before_naming_lost: float | None = None
    # Whether the driver takes the stacks of ranks that still run, in a step of its own.
    takes_stacks: bool = True
    # Whether ranks that still run are ended before the verdict.
    ends_ranks: bool = True


# Processes that this package has started.
OWN_PROCESSES = WatchRules(grace_periods.AFTER_FAILURE, grace_periods.AFTER_DEATH, grace_periods.AFTER_SKIP)
# Processes that a test has started. Nothing but their exit codes may say how they have ended.
FOREIGN_PROCESSES = WatchRules(grace_periods.AFTER_FAILURE, grace_periods.AFTER_FAILURE, takes_stacks=False)
# Processes that a launcher has started. It ends all of them when it has seen one end, so that one is named soon.
LAUNCHED_PROCESSES = WatchRules(
    after_failure=grace_periods.AFTER_FAILURE_FOR_GOOD,
    after_death=grace_periods.AFTER_FAILURE_FOR_GOOD,
    after_skip=grace_periods.AFTER_FAILURE_FOR_GOOD,
    before_naming_lost=grace_periods.AFTER_DEATH,
    ends_ranks=False,
)


class WatchAction(enum.Enum):
    """The actions of a driver."""

    WAIT = "wait for the next event"
    LOOK = "look whether the ranks wait for each other"
    NAME_LOST = "name the ranks that are lost"
    TAKE_STACKS = "take the stacks of the ranks that still run"
    END = "send SIGTERM to the ranks that still run"
    KILL = "send SIGKILL to them"
    JUDGE = "judge the ranks"


@dataclass(frozen=True)
class Step:
    """The next action of a driver. `until`: of WAIT, the moment at which to ask again if nothing has happened."""

    action: WatchAction
    until: float | None = None


class Stop(enum.Enum):
    """The reasons to wait no longer for the test to end in all ranks."""

    ALL_ENDED = "all ranks have ended"
    GRACE_IS_OVER = "the ranks that still run have had the time to see the failure of another"
    TIMED_OUT = "the time of the test is over"
    FOUND = "the ranks cannot end, or their collectives disagree"
    GIVEN_UP = "nobody needs the result"


class RankWatch:
    """The state of the ranks of one test, from its begin until the verdict.

    A driver asks for the next `step`, acts, and reports what happens by the `on_...` methods. Moments are seconds on
    one clock.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        rules: WatchRules,
        expected: Expected | None = None,
        began: float = 0.0,
        timeout: float | None = None,
    ):
        """`timeout`: the time of the test since it `began`; None: it has no limit."""
        self.rules = rules
        self.expected = expected or Expected()
        self.timeout = timeout
        self.deadline = None if timeout is None else began + timeout
        # The ranks in which the test has not ended, and those whose processes are there.
        self.running = set(ranks)
        self.alive = set(self.running)
        # The end of the time that running ranks get since others have ended.
        self.grace_ends: float | None = None
        self.has_failed = False
        self.stacks_timeout = grace_periods.FOR_STACKS
        # When to look next whether ranks wait for each other; None: never.
        self.look_due: float | None = None
        # When the first rank was lost.
        self._lost_at: float | None = None
        self._has_named_lost = False
        self.stop: Stop | None = None
        self._has_stacks = False
        # When SIGTERM was sent.
        self._terminated: float | None = None
        self._is_killed = False

    @property
    def timed_out(self) -> bool:
        return self.stop is Stop.TIMED_OUT

    # -- events

    def on_end(self, report: RankReport, at: float) -> None:
        """The test has ended in a rank. A grace period begins if this keeps the others from ending."""
        self.running.discard(report.rank)
        if report.ending is RankEnding.LOST:
            self._lost_at = at if self._lost_at is None else min(self._lost_at, at)
        if report.ending is RankEnding.SKIPPED and not self.expected.codes_are_open:
            if self.rules.after_skip is not None:
                self._grant(at + self.rules.after_skip)
        elif self.expected.decides(report):
            self.has_failed = True
            has_died = report.ending in (RankEnding.KILLED, RankEnding.EXITED)
            self.stacks_timeout = grace_periods.FOR_STACKS_AFTER_DEATH if has_died else grace_periods.FOR_STACKS
            self._grant(at + (self.rules.after_death if has_died else self.rules.after_failure))

    def on_restart(self, rank: int) -> None:
        """A rank that a fault has ended runs the test again."""
        self.running.add(rank)
        self.alive.add(rank)

    def limit(self, until: float) -> None:
        """The test ends then, at the latest."""
        self.deadline = until if self.deadline is None else min(self.deadline, until)

    def on_exit(self, rank: int) -> None:
        """The process of a rank has ended."""
        self.running.discard(rank)
        self.alive.discard(rank)

    def on_pause(self, until: float) -> None:
        """The user has had a rank in the debugger: the time of the test and the grace period begin again."""
        if self.timeout is not None:
            self.deadline = until + self.timeout
        if self.grace_ends is not None:
            self.grace_ends = until + self.rules.after_failure

    def on_finding(self) -> None:
        """The ranks cannot end, or their collectives disagree."""
        if self.stop is None:
            self.stop = Stop.FOUND

    def on_named(self) -> None:
        """The ranks that are lost have been named."""
        self._has_named_lost = True

    def on_stacks(self) -> None:
        """The stacks have been taken."""
        self._has_stacks = True

    def on_terminated(self, at: float) -> None:
        """SIGTERM has been sent."""
        self._terminated = at

    def on_killed(self) -> None:
        """SIGKILL has been sent."""
        self._is_killed = True

    def give_up(self) -> None:
        """End all ranks now, also those that have ended their test: nobody asks where they are."""
        self._has_stacks = True
        if self.stop in (None, Stop.ALL_ENDED):
            self.stop = Stop.GIVEN_UP

    def _grant(self, end: float) -> None:
        self.grace_ends = end if self.grace_ends is None else min(self.grace_ends, end)

    # -- the next step

    def step(self, now: float) -> Step:
        """Return the next step. As soon as there is a reason to stop waiting, that one stays."""
        if self.stop is None:
            self.stop = self._why_stop(now)
        return self._while_waiting(now) if self.stop is None else self._after_waiting(now)

    def _why_stop(self, now: float) -> Stop | None:
        if not self.running:
            return Stop.ALL_ENDED
        end = self._end_of_waiting()
        look_due = self._look_due()
        looks_first = look_due is not None and end is not None and look_due <= end
        if end is None or now < end or looks_first:
            return None
        return Stop.TIMED_OUT if end == self.deadline else Stop.GRACE_IS_OVER

    def _while_waiting(self, now: float) -> Step:
        naming_due = self._naming_due()
        moments = (self._end_of_waiting(), self._look_due(), naming_due)
        until = min((moment for moment in moments if moment is not None), default=None)
        if until is None or now < until:
            return Step(WatchAction.WAIT, until)
        return Step(WatchAction.NAME_LOST if until == naming_due else WatchAction.LOOK)

    def _after_waiting(self, now: float) -> Step:
        if self.stop is Stop.ALL_ENDED:
            return Step(WatchAction.JUDGE)
        if self.rules.takes_stacks and not self._has_stacks and self.running:
            return Step(WatchAction.TAKE_STACKS)
        if not self.rules.ends_ranks or not self.alive:
            return Step(WatchAction.JUDGE)
        if self._terminated is None:
            return Step(WatchAction.END)
        if self._is_killed:
            return Step(WatchAction.WAIT)
        until = self._terminated + AFTER_SIGTERM
        return Step(WatchAction.WAIT, until) if now < until else Step(WatchAction.KILL)

    def _end_of_waiting(self) -> float | None:
        """The moment at which waiting is over. The grace period goes on until ranks that are lost have been named."""
        grace_ends = self.grace_ends if self._naming_due() is None else None
        ends = (self.deadline, grace_ends)
        return min((end for end in ends if end is not None), default=None)

    def _look_due(self) -> float | None:
        """The moment of the next look. After a failure, the others end soon."""
        return None if self.has_failed else self.look_due

    def _naming_due(self) -> float | None:
        if self.rules.before_naming_lost is None or self._lost_at is None or self._has_named_lost:
            return None
        return self._lost_at + self.rules.before_naming_lost


# --------------------------------------------------------------------------------------------------------------------
# Watches a run: waits for exits, ends the ranks that do not end, and collects a report of every rank.
#
# Waits for exits, and for time only at deadlines. A `RankWatch` decides what follows from both; the code below does it.

# Seconds without news until ranks that are not sanitized are looked at for the first time: when the prober is due. Most
# tests are over by then, and have not imported it.
FIRST_LOOK = 0.75
# Seconds between looks at the faults of a test.
LOOK_AT_FAULTS = 0.05


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
        self.plan = self.records.plan or FaultPlan()
        if self.records.plan is not None:
            # Ranks that go on without a peer issue other calls than it does.
            expected = replace(expected, faults=self.plan, may_differ=True)
        self.expected = expected
        self.state = RankWatch(range(len(run.pids)), OWN_PROCESSES, expected, began, timeout)
        self.looks = Looks(run, expected, self.records.logs, None if timeout is None else endless or timeout)
        # What NCCL says of ranks that hang.
        self.nccl: NcclStatus | None = None
        # When a rank has last been in the debugger.
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
        self.take_endings()
        while True:
            step = self.state.step(reached)
            if step.action is WatchAction.LOOK:
                self._look()
            elif step.action is not WatchAction.WAIT:
                return
            elif self.run.wait_for_event(self._until(step.until)):
                if self.take_endings():
                    self._on_news(now())
            elif not self._was_paused():
                self._look_at_faults()
                reached = now()

    def take_endings(self) -> bool:
        """Take the ends of ranks since the last call. Returns whether there were any."""
        ranks = self.records.take_new()
        restarting = []
        for rank in ranks:
            report, at = self.records.report(rank), self.records.exit_of(rank).at
            self.state.on_end(report, at)
            if report.ending is RankEnding.FAULT and rank in self.plan.restarts and rank not in self.records.restarted:
                restarting.append(rank)
        self._take_exits()
        for rank in restarting:
            self.records.on_restart(rank)
            self.run.restart(rank)
            self.state.on_restart(rank)
            # The log of its first process is not that of its calls now.
            self.looks.give_up()
            self.state.look_due = None
        return bool(ranks)

    def _take_exits(self) -> None:
        for rank in self.state.alive.difference(self.run.alive):
            self.state.on_exit(rank)

    # -- faults of the test

    def _until(self, until: float | None) -> float | None:
        """The time to look at the faults, which only the logs tell as long as a rank lives."""
        if (self.plan.within is None or self._is_limited) and not self._may_be_frozen():
            return until
        soon = now() + LOOK_AT_FAULTS
        return soon if until is None else min(soon, until)

    def _look_at_faults(self) -> None:
        """Limit the time of the test after the first fault, and end ranks that nobody is left to heal."""
        if self.plan.within is not None and not self._is_limited:
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
        return bool(self.plan.faults and self.state.running) and self.state.running <= self.plan.stopped_for_good

    def _kill_frozen(self, ranks: Sequence[int]) -> None:
        """End ranks that a fault has stopped. They would get SIGTERM when they go on."""
        for rank in ranks:
            self.records.frozen.add(rank)
            self.run.signal(signal.SIGKILL, rank)

    def _on_news(self, at: float) -> None:
        self.looks.on_news(at)
        self.state.look_due = self.looks.due

    def _was_paused(self) -> bool:
        """Is a rank in the debugger, or was it so since the last call? Then the time begins again."""
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
        self.run.dump(self.state.stacks_timeout, [r for r in self.pending if not self.records.is_stopped_by_fault(r)])

    def _ask_nccl(self) -> None:
        """Ask NCCL about ranks that hang, while they are there. It takes no time where they have not used NCCL."""
        if self.state.timed_out or self.looks.finding is not None:
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
        note_memory(report.account.memory for report in reports if report.account is not None)
        return RankEvidence(reports, self.state.timed_out, self.expected, self.looks.finding, note)

    def _with_nccl(self, report: RankReport) -> RankReport:
        if self.nccl is None:
            return report
        return replace(report, nccl=self.nccl.processes.get(self.run.pids[report.rank]))


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
        return self._last_news + (0.0 if self._logs else FIRST_LOOK)

    def give_up(self) -> None:
        """Look no more."""
        self._endless = None

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
        from torch_testing_ext._collectives.proof.proof_of_hang import ProofRules

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
        # Those that a fault has ended, and that run again; and those that were ended while a fault had them stopped.
        self.restarted: set[int] = set()
        self.frozen: set[int] = set()
        paths = [log_of(run.job.directory, rank) for rank in range(run.job.world_size)]
        self.logs = logs_of(paths, run.job.sanitize)

    @property
    def plan(self) -> FaultPlan | None:
        """The faults of the test."""
        return None if self.logs is None else self.logs.sanitize.faults

    def on_restart(self, rank: int) -> None:
        """A rank is started again: its first end was a fault of the test."""
        self.restarted.add(rank)
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
        if rank in self.restarted:
            return replace(report, faults=seen)
        return with_faults(report, seen, rank in self.frozen)

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
        if not have_passed or any(report.recorder for report in reports) or read_settings().lanes:
            write_lanes(self.run.job.directory, self.run.began, reports, collectives)
        return tuple(reports)

    def _has_ended(self, rank: int) -> bool:
        return rank in self.answers or rank in self.run.exits

    def _collectives(self, rank: int, only_left: bool) -> RawRecord | None:
        """The collectives that a rank left, or reported when it was asked."""
        left = _read_record(self.left(rank))
        if left is not None or only_left:
            return left
        reported = _read_record(content_of(self.run.job.recorder(rank)))
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
    from .probes import Logs

    return Logs(paths, sanitize)
