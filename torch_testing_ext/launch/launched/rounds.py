"""Rounds: tests that all ranks of a launcher run together.

Pure: messages come in, and what to do next comes out.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from torch_testing_ext.launch import hang
from torch_testing_ext.launch.accounts import RankAccount, RankEnding
from torch_testing_ext.launch.launched.round_messages import RankBegins, RankEnds, RankStacks
from torch_testing_ext.launch.rank_reports import RankReport, report_of
from torch_testing_ext.launch.watching.rules import LAUNCHED_PROCESSES, RankWatch

HAS_LEFT = "its process was killed, crashed or exited"


class Meeting(enum.Enum):
    """The state of ranks that are to begin a test together."""

    INCOMPLETE = "some ranks have yet to begin"
    IMPOSSIBLE = "they cannot run a test together"
    COMPLETE = "all ranks have begun the same test"


@dataclass
class RoundState:
    """The messages of the ranks about one round.

    Of any round, `left`: when connections of ranks have closed, `done`: ranks that are at the end of their tests,
    `absent`: ranks that had not connected when the time of an earlier round to begin was over.
    """

    number: int
    world_size: int
    left: dict[int, float]
    done: Container[int] = ()
    absent: Container[int] = ()
    begun: dict[int, RankBegins] = field(default_factory=dict)
    accounts: dict[int, RankAccount] = field(default_factory=dict)
    # The moment at which all had begun.
    began: float | None = None
    # Until all have begun, the end of the time that the others get for that.
    meeting_ends: float | None = None
    # The watch over the ranks since all have begun.
    watch: RankWatch | None = None

    # -- events

    def on_begin(self, rank: int, message: RankBegins, now: float) -> None:
        self.begun[rank] = message
        if self.meeting_ends is None and message.timeout is not None:
            self.meeting_ends = now + message.timeout

    def on_end(self, rank: int, message: RankEnds) -> None:
        if message.number != self.number:
            # Late: the verdict is known.
            return
        self.accounts[rank] = message.account
        if self.watch is not None:
            self.watch.on_end(RankReport(rank, message.account.ending), message.account.ended)

    def on_leave(self, rank: int, now: float) -> None:
        """The connection of a rank has closed."""
        if rank in self.left:
            return
        self.left[rank] = now
        if self.watch is not None:
            self._watch_left(self.watch, rank)

    def start(self, now: float) -> None:
        """All ranks have begun: from now on they are watched."""
        self.began = now
        self.watch = RankWatch(self.begun, LAUNCHED_PROCESSES, began=now, timeout=self.begun[0].timeout)
        for rank in self.left:
            self._watch_left(self.watch, rank)

    def _watch_left(self, watch: RankWatch, rank: int) -> None:
        if rank not in self.accounts:
            watch.on_end(RankReport(rank, RankEnding.LOST), self.left[rank])
        watch.on_exit(rank)

    # -- what follows

    @property
    def running(self) -> list[int]:
        """The ranks that have begun, and neither ended the test nor left."""
        return [rank for rank in self.begun if rank not in self.accounts and rank not in self.left]

    @property
    def lost(self) -> list[int]:
        """The ranks that have left without an account."""
        return sorted(rank for rank in self.left if rank not in self.accounts)

    def meeting(self, now: float) -> Meeting:
        """The state of the ranks until all have begun."""
        if not self.begun:
            return Meeting.INCOMPLETE
        if self.why_refused(now):
            return Meeting.IMPOSSIBLE
        return Meeting.COMPLETE if len(self.begun) == self.world_size else Meeting.INCOMPLETE

    def why_refused(self, now: float) -> str:
        """Why the ranks cannot run a test together; "" if they can, as far as is known."""
        names = {rank: message.case.name for rank, message in sorted(self.begun.items())}
        missing = [rank for rank in range(self.world_size) if rank not in self.begun]
        if len(set(names.values())) > 1:
            tests = "; ".join(f"rank {rank} runs {name}" for rank, name in names.items())
            return f"the ranks of the launcher run different tests: {tests}"
        gone = [rank for rank in missing if rank in self.left]
        if gone:
            return f"rank {gone[0]} of {self.world_size} is missing: {HAS_LEFT}"
        done = [rank for rank in missing if rank in self.done]
        if done:
            return f"rank {done[0]} of {self.world_size} has ended its tests (-x, or an error before them)"
        absent = [rank for rank in missing if rank in self.absent]
        if absent:
            return f"rank {absent[0]} of {self.world_size} has not come, and an earlier test has waited for it"
        if missing and self.is_overdue(now):
            return f"rank {missing[0]} of {self.world_size} did not start {next(iter(names.values()))} in time"
        return ""

    def is_overdue(self, now: float) -> bool:
        """Whether the time of the ranks to begin is over."""
        return self.meeting_ends is not None and now >= self.meeting_ends

    def short_accounts(self) -> tuple[RankAccount | None, ...]:
        """Return the accounts of all ranks without tracebacks and collectives, which only the verdict needs."""
        accounts = (self.accounts.get(rank) for rank in range(self.world_size))
        return tuple(account and replace(account, traceback="", collectives=b"") for account in accounts)

    def report(self, rank: int, now: float, stacks: Mapping[int, RankStacks]) -> RankReport:
        """The report of a rank at the end of the round. `stacks`: of ranks that still run."""
        assert self.began is not None
        if (account := self.accounts.get(rank)) is not None:
            seconds = max(0.0, account.ended - self.began)
            return report_of(rank, account, seconds)
        if rank in self.left:
            at = self.left[rank]
            return RankReport(rank, RankEnding.LOST, max(0.0, at - self.began), at, lost=HAS_LEFT)
        text = stacks[rank].text if rank in stacks else ""
        return RankReport(rank, RankEnding.STOPPED, now - self.began, now, stacks=hang.without_harness(text))
