"""Rounds: tests that all ranks of a launcher run together. Pure: messages come in, and what to do next comes out."""

import enum
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from torch_testing_ext._process import grace

from . import hang
from .accounts import RankAccount, RankEnding
from .job import Sanitize
from .rank_report import RankReport, report_of
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
    address: str  # of the machine of rank 0
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


class NextStep(enum.Enum):
    """The next step of the hub."""

    WAIT = "wait"
    REFUSE = "refuse"
    START = "start"
    NAME_LOST = "name the ranks that have left"
    JUDGE = "judge"


@dataclass
class RoundState:
    """The messages of the ranks about one round.

    Of any round, `left`: when connections of ranks have closed, `told`: ranks that are at the end of their tests.
    """

    number: int
    world_size: int
    left: dict[int, float]
    told: Container[int] = ()
    begun: dict[int, RankBegins] = field(default_factory=dict)
    accounts: dict[int, RankAccount] = field(default_factory=dict)
    began: float | None = None  # when all had begun
    deadline: float | None = None
    has_named_lost: bool = False

    def on_begin(self, rank: int, message: RankBegins, now: float) -> None:
        self.begun[rank] = message
        if self.deadline is None and message.timeout is not None:
            self.deadline = now + message.timeout

    def on_end(self, rank: int, message: RankEnds) -> None:
        if message.number == self.number:  # not late, when the verdict is known
            self.accounts[rank] = message.account

    def start(self, now: float) -> None:
        timeout = self.begun[0].timeout
        self.began, self.deadline = now, None if timeout is None else now + timeout

    @property
    def running(self) -> list[int]:
        """The ranks that have begun, and neither ended the test nor left."""
        return [rank for rank in self.begun if rank not in self.accounts and rank not in self.left]

    @property
    def lost(self) -> list[int]:
        """The ranks that have left without an account."""
        return sorted(rank for rank in self.left if rank not in self.accounts)

    def due(self) -> float | None:
        """The moment at which to ask for the next step, whatever happens."""
        ends = [end for end in (self.deadline, self._grace_ends()) if end is not None]
        return min(ends, default=None)

    def next_step(self, now: float) -> NextStep:
        if not self.begun:
            return NextStep.WAIT
        if self.began is None:
            if self.why_refused(now):
                return NextStep.REFUSE
            return NextStep.START if len(self.begun) == self.world_size else NextStep.WAIT
        if not self.running or self.has_timed_out(now):
            return NextStep.JUDGE
        grace_ends = self._grace_ends()
        if grace_ends is None or now < grace_ends:
            return NextStep.WAIT
        return NextStep.NAME_LOST if self.lost and not self.has_named_lost else NextStep.JUDGE

    def has_timed_out(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    def why_refused(self, now: float) -> str:
        """Why the ranks cannot run a test together; "" if they can, as far as is known."""
        names = {rank: message.case.name for rank, message in sorted(self.begun.items())}
        missing = [rank for rank in range(self.world_size) if rank not in self.begun]
        if len(set(names.values())) > 1:
            each = "; ".join(f"rank {rank} runs {name}" for rank, name in names.items())
            return f"the ranks of the launcher run different tests: {each}"
        if gone := [rank for rank in missing if rank in self.left]:
            return f"rank {gone[0]} of {self.world_size} is missing: {HAS_LEFT}"
        if ended := [rank for rank in missing if rank in self.told]:
            return f"rank {ended[0]} of {self.world_size} has ended its tests (-x, or an error before them)"
        if missing and self.has_timed_out(now):
            return f"rank {missing[0]} of {self.world_size} has not begun {next(iter(names.values()))} in time"
        return ""

    def _grace_ends(self) -> float | None:
        """The moment at which the ranks that still run have had the time to see what another rank did."""
        if self.began is None:
            return None
        left = [self.left[rank] for rank in self.lost]
        if left and not self.has_named_lost:
            return min(left) + grace.AFTER_DEATH
        ends = [account.ended for account in self.accounts.values() if account.ending is not RankEnding.PASSED]
        return min((at + grace.AFTER_FAILURE_FOR_GOOD for at in (*left, *ends)), default=None)

    def short_accounts(self) -> tuple[RankAccount | None, ...]:
        """Return the accounts of all ranks without tracebacks and collectives, which only the verdict needs."""
        found = (self.accounts.get(rank) for rank in range(self.world_size))
        return tuple(one and replace(one, traceback="", collectives=b"") for one in found)

    def report(self, rank: int, now: float, stacks: Mapping[int, RankStacks]) -> RankReport:
        assert self.began is not None
        if (account := self.accounts.get(rank)) is not None:
            seconds = max(0.0, account.ended - self.began)
            return report_of(rank, account, seconds)
        if rank in self.left:
            at = self.left[rank]
            return RankReport(rank, RankEnding.LOST, max(0.0, at - self.began), at, summary=HAS_LEFT)
        text = stacks[rank].text if rank in stacks else ""
        return RankReport(rank, RankEnding.STOPPED, now - self.began, now, stacks=hang.tidy(text))
