"""How an example ended in a rank, how it ended for all of them, and what is said of it. Pure."""

from __future__ import annotations

import enum
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis.errors import UnsatisfiedAssumption

from torch_testing_ext.launch import RankEnding, RankReport
from torch_testing_ext.launch.rank import format_error, summarize
from torch_testing_ext.launch.verdict import is_victim

from .values import NoMoreDraws


class ExampleKind(enum.Enum):
    PASSED = "passed"
    REJECTED = "rejected the example"
    SKIPPED = "skipped"
    FAILED = "failed"
    WOKEN = "was waiting for another rank"  # and had to be got out of it


@dataclass(frozen=True)
class ExampleOutcome:
    kind: ExampleKind
    summary: str = ""
    traceback: str = ""
    notes: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def settles_alone(self) -> bool:
        """Does this end of the example in one rank make it pointless in the others?"""
        return self.kind is not ExampleKind.PASSED


def of_error(error: BaseException, woken: bool) -> ExampleOutcome:
    """The outcome of a body that raised. `woken`: its waits were broken off before it did."""
    if isinstance(error, UnsatisfiedAssumption):
        return ExampleOutcome(ExampleKind.REJECTED)
    if isinstance(error, unittest.SkipTest):
        return ExampleOutcome(ExampleKind.SKIPPED, str(error))
    summary = summarize(error)
    lost_peer = not isinstance(error, AssertionError) and (
        woken or isinstance(error, NoMoreDraws) or _lost_its_peer(summary)
    )
    return ExampleOutcome(ExampleKind.WOKEN if lost_peer else ExampleKind.FAILED, summary, format_error(error))


def _lost_its_peer(summary: str) -> bool:
    return is_victim(RankReport(0, RankEnding.ERROR, summary=summary))


@dataclass(frozen=True)
class JudgedExample:
    """What all ranks make of one example."""

    kind: ExampleKind
    outcomes: tuple[ExampleOutcome, ...]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks to blame for a failure. Where ranks only ever waited for one another: those that waited."""
        failed = self._with(ExampleKind.FAILED)
        return failed or self._with(ExampleKind.WOKEN)

    @property
    def is_damaging(self) -> bool:
        """May the ranks have taken part in different collectives? Not if all of them came equally far."""
        return len({outcome.kind for outcome in self.outcomes}) > 1 or self.kind in (
            ExampleKind.FAILED,
            ExampleKind.WOKEN,
        )

    def _with(self, kind: ExampleKind) -> tuple[int, ...]:
        return tuple(rank for rank, outcome in enumerate(self.outcomes) if outcome.kind is kind)

    def scores(self) -> dict[str, float]:
        """What Hypothesis is to climb: of each label the highest score of any rank."""
        highest: dict[str, float] = {}
        for outcome in self.outcomes:
            for label, score in outcome.scores.items():
                highest[label] = max(score, highest.get(label, score))
        return highest

    def headline(self) -> str:
        """What went wrong, in one line."""
        first, size = self.culprits[0], len(self.outcomes)
        if self.kind is ExampleKind.WOKEN:
            return f"hangs: {_name(self.culprits)} of {size} waited for another rank, until that was broken off"
        return f"fails on {_name(self.culprits)} of {size}: {self.outcomes[first].summary.partition(chr(10))[0]}"

    def describe(self) -> str:
        """A line a rank, the culprits first."""
        ranks = sorted(range(len(self.outcomes)), key=lambda rank: (rank not in self.culprits, rank))
        return "\n".join(f"  rank {rank}: {_line(self.outcomes[rank])}" for rank in ranks)

    def tracebacks(self) -> str:
        """One of each: ranks that failed alike are told of once."""
        told: dict[str, list[int]] = {}
        for rank in self.culprits:
            told.setdefault(self.outcomes[rank].traceback.rstrip(), []).append(rank)
        return "\n\n".join(f"{_name(ranks)}'s traceback:\n{text}" for text, ranks in told.items() if text)

    def notes(self) -> str:
        told: dict[str, list[int]] = {}
        for rank, outcome in enumerate(self.outcomes):
            for note in outcome.notes:
                told.setdefault(note, []).append(rank)
        everyone = list(range(len(self.outcomes)))
        return "\n".join(note if ranks == everyone else f"{_name(ranks)}: {note}" for note, ranks in told.items())


def judge_example(outcomes: Sequence[ExampleOutcome]) -> JudgedExample:
    """One kind for all: a failure outweighs a skip, that a rejection, and that a wait that was broken off."""
    kinds = {outcome.kind for outcome in outcomes}
    order = (ExampleKind.FAILED, ExampleKind.SKIPPED, ExampleKind.REJECTED, ExampleKind.WOKEN)
    return JudgedExample(next((kind for kind in order if kind in kinds), ExampleKind.PASSED), tuple(outcomes))


def _line(outcome: ExampleOutcome) -> str:
    if outcome.kind is ExampleKind.WOKEN:
        return outcome.kind.value  # by which error it got out of it says nothing
    first = outcome.summary.partition("\n")[0]
    return f"{outcome.kind.value}: {first}" if first else outcome.kind.value


def _name(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
