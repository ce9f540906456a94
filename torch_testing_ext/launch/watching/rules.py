"""The rules of watching: what follows for the ranks of a test from how they end, and from the time.

Pure: no clock, process or I/O. Drivers report events to a `RankWatch` and do what its steps say: `run_watcher`,
`persistent_ranks` and `coordinator` for processes, `_testing/bases/own_ranks` for processes of multiprocessing,
`_testing/bases/threaded_ranks` for threads.

When a rank has failed, the others get a short grace period to report the failure as they saw it. Then the stacks of
those still running are taken. Then they are ended by SIGTERM, and after another grace period by SIGKILL.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from torch_testing_ext._process.ends import AFTER_SIGTERM
from torch_testing_ext.launch import grace_periods
from torch_testing_ext.launch.accounts import RankEnding
from torch_testing_ext.launch.rank_reports import RankReport
from torch_testing_ext.launch.verdict import Expected


@dataclass(frozen=True)
class WatchRules:
    """The seconds that ranks get which still run after another has ended, and what is done with them after that."""

    # None: a rank that fails does not limit the time of the others.
    after_failure: float | None
    after_death: float | None
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


# Processes that this package has started, and that do not wait for each other: each has a time of its own.
IN_TURNS = WatchRules(None, None)


# Ranks in turns of which one has failed: so many show which ones fail alike.
ENOUGH_IN_TURNS = 64


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
        in_turns: Iterable[int] = (),
    ):
        """`timeout`: the time of the test since it `began`; None: no limit. `in_turns`: ranks that begin later."""
        self.rules = rules
        self.expected = expected or Expected()
        self.timeout = timeout
        self.deadline = None if timeout is None else began + timeout
        # The ranks whose processes are there, those whose turn has not come, and those in which the test has not ended.
        self.alive = set(ranks)
        self.waiting = set(in_turns)
        self.running = self.alive | self.waiting
        # Ranks in turns have a time of their own: when each of those that run began.
        self._begun = dict.fromkeys(self.alive, began) if self.waiting else None
        # The end of the time that running ranks get since others have ended.
        self.grace_ends: float | None = None
        self.has_failed = False
        self.stacks_timeout = grace_periods.FOR_STACKS
        # The moment of the next look whether ranks wait for each other; None: never.
        self.look_due: float | None = None
        # The moment at which the first rank was lost.
        self._lost_at: float | None = None
        self._has_named_lost = False
        self.stop: Stop | None = None
        self._has_stacks = False
        # The moment at which SIGTERM was sent.
        self._terminated: float | None = None
        self._is_killed = False

    @property
    def timed_out(self) -> bool:
        return self.stop is Stop.TIMED_OUT

    # -- events

    def on_end(self, report: RankReport, at: float) -> None:
        """The test has ended in a rank. A grace period begins if this keeps the others from ending."""
        self.running.discard(report.rank)
        if self._begun is not None:
            self._begun.pop(report.rank, None)
            self._limit_turns()
        if report.ending is RankEnding.LOST:
            self._lost_at = at if self._lost_at is None else min(self._lost_at, at)
        if report.ending is RankEnding.SKIPPED and not self.expected.codes_are_open:
            self._grant(at, self.rules.after_skip)
        elif self.expected.decides(report):
            self.has_failed = True
            has_died = report.ending in (RankEnding.KILLED, RankEnding.EXITED)
            self.stacks_timeout = grace_periods.FOR_STACKS_AFTER_DEATH if has_died else grace_periods.FOR_STACKS
            self._grant(at, self.rules.after_death if has_died else self.rules.after_failure)
            rest = {rank for rank in self.waiting if rank >= ENOUGH_IN_TURNS}
            self.waiting -= rest
            self.running -= rest

    def on_turn(self, rank: int, at: float) -> None:
        """A rank has begun whose turn has come."""
        self.waiting.discard(rank)
        self.alive.add(rank)
        if self._begun is not None:
            self._begun[rank] = at
            self._limit_turns()

    def _limit_turns(self) -> None:
        """Of ranks in turns, the time of the first that runs ends next."""
        if self._begun is not None and self.timeout is not None:
            self.deadline = min(self._begun.values()) + self.timeout if self._begun else None

    def on_restart(self, rank: int) -> None:
        """A rank that a fault has ended runs the test again."""
        self.running.add(rank)
        self.alive.add(rank)

    def limit(self, until: float) -> None:
        """The test ends then, at the latest."""
        self.deadline = until if self.deadline is None else min(self.deadline, until)

    def on_exit(self, rank: int) -> None:
        """The process of a rank has ended, or will never be there."""
        self.running.discard(rank)
        self.alive.discard(rank)
        self.waiting.discard(rank)

    def on_pause(self, until: float) -> None:
        """The user has had a rank in the debugger: the time of the test and the grace period begin again."""
        if self.timeout is not None:
            self.deadline = until + self.timeout
        if self.grace_ends is not None:
            self.grace_ends = until + (self.rules.after_failure or 0.0)

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

    def _grant(self, at: float, grace: float | None) -> None:
        if grace is not None:
            self.grace_ends = at + grace if self.grace_ends is None else min(self.grace_ends, at + grace)

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
