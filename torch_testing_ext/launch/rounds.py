"""Rounds: tests that all ranks of a launcher run together. Pure: messages come in, and what to do next comes out."""

import enum
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from . import hang
from .accounts import RankAccount, RankEnding
from .job import Sanitize
from .rank_report import RankReport, report_of
from .rank_watch import LAUNCHED_PROCESSES, RankWatch
from .verdict import Case, Verdict

HAS_LEFT = "its process has ended: it was killed, crashed or exited"


# -- what a rank says to the hub


@dataclass(frozen=True)
class RankJoined:
    """The first message of a connection. `token`: see hub.py."""

    rank: int
    token: str


@dataclass(frozen=True)
class RankBegins:
    """The rank is about to run this test."""

    case: Case
    directory: str
    timeout: float | None
    may_differ: bool
    sanitize: Sanitize


@dataclass(frozen=True)
class RankEnds:
    """The test of this round is over in the rank."""

    number: int
    account: RankAccount


@dataclass(frozen=True)
class RankStacks:
    """The rank's stacks, and the collectives that it has issued so far."""

    text: str
    collectives: bytes


@dataclass(frozen=True)
class RankTells:
    """All tests are over in the rank. `reports`: what rank 0 has to tell for it, serialised."""

    reports: tuple[str, ...]


FromRank = RankJoined | RankBegins | RankEnds | RankStacks | RankTells


# -- what the hub says to a rank


@dataclass(frozen=True)
class Round:
    """All ranks have begun the test. `directory`, `address` and `port` are for them all."""

    number: int
    directory: str
    # Of the machine of rank 0.
    address: str
    port: int
    sanitize: Sanitize


@dataclass(frozen=True)
class RoundRefused:
    """The ranks cannot run this test together."""

    message: str


@dataclass(frozen=True)
class AskForStacks:
    """The rank is to say where it is."""


@dataclass(frozen=True)
class RoundJudged:
    """The round is over. `failed`: the ranks that failed by themselves.

    `accounts`: of all ranks, without tracebacks and collectives; None for a rank that left none.
    `is_deadlocked`: some ranks cannot go on, and every process whose test does not return ends itself.
    """

    verdict: Verdict
    failed: tuple[int, ...]
    accounts: tuple[RankAccount | None, ...]
    is_deadlocked: bool


@dataclass(frozen=True)
class RankHeard:
    """Rank 0 tells what the rank has told it."""


FromHub = Round | RoundRefused | AskForStacks | RoundJudged | RankHeard


# -- the state of a round


class Meeting(enum.Enum):
    """The state of ranks that are to begin a test together."""

    INCOMPLETE = "some ranks have yet to begin"
    IMPOSSIBLE = "they cannot run a test together"
    COMPLETE = "all ranks have begun the same test"


@dataclass
class RoundState:
    """The messages of the ranks about one round.

    Of any round, `left`: when connections of ranks have closed, `done`: ranks that are at the end of their tests.
    """

    number: int
    world_size: int
    left: dict[int, float]
    done: Container[int] = ()
    begun: dict[int, RankBegins] = field(default_factory=dict)
    accounts: dict[int, RankAccount] = field(default_factory=dict)
    # When all had begun.
    began: float | None = None
    # Until then, the end of the time that the others get to begin.
    meeting_ends: float | None = None
    # The ranks since then.
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
        if missing and self.meeting_ends is not None and now >= self.meeting_ends:
            return f"rank {missing[0]} of {self.world_size} has not begun {next(iter(names.values()))} in time"
        return ""

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
            return RankReport(rank, RankEnding.LOST, max(0.0, at - self.began), at, summary=HAS_LEFT)
        text = stacks[rank].text if rank in stacks else ""
        return RankReport(rank, RankEnding.STOPPED, now - self.began, now, stacks=hang.tidy(text))
