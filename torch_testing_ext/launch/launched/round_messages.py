"""The messages between the ranks that a launcher has started and their coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from torch_testing_ext.launch.accounts import RankAccount
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.verdict import Case, Verdict


@dataclass(frozen=True)
class RankJoined:
    """The first message of a connection. `token`: that of the CoordinatorAddress."""

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


# What a rank says to the coordinator.
FromRank = RankJoined | RankBegins | RankEnds | RankStacks | RankTells


@dataclass(frozen=True)
class Round:
    """All ranks have begun the test. `directory`, `address` and `port` are for them all."""

    number: int
    directory: str
    # The address of the machine of rank 0.
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


# What the coordinator says to a rank.
FromCoordinator = Round | RoundRefused | AskForStacks | RoundJudged | RankHeard
