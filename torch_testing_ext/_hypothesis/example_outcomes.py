"""The end of an example in one rank and in all of them, and the text that reports it.

Pure: it knows no process and no clock.
"""

import enum
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis.errors import UnsatisfiedAssumption

from torch_testing_ext._process.words import grouped, list_of
from torch_testing_ext.launch import Cause, cause_of, format_error, summarize

from .blueprints import NoMoreDraws


class ExampleKind(enum.Enum):
    """The ways in which an example can end."""

    PASSED = "passed"
    REJECTED = "rejected the example"
    SKIPPED = "skipped"
    FAILED = "failed"
    # It waited until the watchdog interrupted it.
    INTERRUPTED = "was waiting for another rank"


@dataclass(frozen=True)
class ExampleOutcome:
    """The end of an example in one rank."""

    kind: ExampleKind
    summary: str = ""
    traceback: str = ""
    notes: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def ends_example(self) -> bool:
        """Whether this outcome of one rank makes the example pointless in the others."""
        return self.kind is not ExampleKind.PASSED


def outcome_of_error(error: BaseException, interrupted: bool) -> ExampleOutcome:
    """Return the outcome of a body that raised. `interrupted`: whether its waits had been interrupted before."""
    if isinstance(error, UnsatisfiedAssumption):
        return ExampleOutcome(ExampleKind.REJECTED)
    if isinstance(error, unittest.SkipTest):
        return ExampleOutcome(ExampleKind.SKIPPED, str(error))
    kind = ExampleKind.INTERRUPTED if _has_lost_peer(error, interrupted) else ExampleKind.FAILED
    return ExampleOutcome(kind, summarize(error), format_error(error))


def _has_lost_peer(error: BaseException, interrupted: bool) -> bool:
    """Whether the error was raised because another rank has left the example."""
    if isinstance(error, AssertionError):
        return False
    return interrupted or isinstance(error, NoMoreDraws) or cause_of(error) is Cause.LOST_PEER


@dataclass(frozen=True)
class JudgedExample:
    """The end of one example in all ranks together."""

    kind: ExampleKind
    outcomes: tuple[ExampleOutcome, ...]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that caused a failure. If ranks only waited for one another: those that waited."""
        failed = self._with(ExampleKind.FAILED)
        return failed or self._with(ExampleKind.INTERRUPTED)

    @property
    def is_damaging(self) -> bool:
        """Whether the ranks may have taken part in different collectives. Not if all of them got equally far."""
        kinds = {outcome.kind for outcome in self.outcomes}
        return len(kinds) > 1 or self.kind in (ExampleKind.FAILED, ExampleKind.INTERRUPTED)

    def _with(self, kind: ExampleKind) -> tuple[int, ...]:
        return tuple(rank for rank, outcome in enumerate(self.outcomes) if outcome.kind is kind)

    def scores(self) -> dict[str, float]:
        """Return the scores that Hypothesis is to maximise: for each label, the highest score of any rank."""
        highest: dict[str, float] = {}
        for outcome in self.outcomes:
            for label, score in outcome.scores.items():
                highest[label] = max(score, highest.get(label, score))
        return highest

    def headline(self) -> str:
        size = len(self.outcomes)
        ranks = list_of(self.culprits)
        if self.kind is ExampleKind.INTERRUPTED:
            return f"hangs: {ranks} of {size} waited for another rank until the wait was interrupted"
        first = self.outcomes[self.culprits[0]]
        return f"fails on {ranks} of {size}: {_first_line(first.summary)}"

    def describe(self) -> str:
        """Show a line for each rank, those of the culprits first."""
        others = [rank for rank in range(len(self.outcomes)) if rank not in self.culprits]
        lines = [f"  rank {rank}: {line_of(self.outcomes[rank])}" for rank in (*self.culprits, *others)]
        return "\n".join(lines)

    def tracebacks(self) -> str:
        """Show each traceback of the culprits once, with the ranks that share it."""
        ranks_by_text = grouped((self.outcomes[rank].traceback.rstrip(), rank) for rank in self.culprits)
        parts = []
        for text, ranks in ranks_by_text.items():
            if text:
                parts.append(f"{list_of(ranks)}'s traceback:\n{text}")
        return "\n\n".join(parts)

    def notes(self) -> str:
        """Show each note once, with the ranks that share it unless all do."""
        notes = [(note, rank) for rank, outcome in enumerate(self.outcomes) for note in outcome.notes]
        all_ranks = list(range(len(self.outcomes)))
        lines = []
        for note, ranks in grouped(notes).items():
            lines.append(note if ranks == all_ranks else f"{list_of(ranks)}: {note}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PropertyResult:
    """The end of the whole property, as rank 0 reports it to the others."""

    # The ranks that failed in the smallest example; the first one reports it.
    culprits: tuple[int, ...] = ()
    report: str = ""
    # The reason of each rank that skipped.
    skips: Mapping[int, str] = field(default_factory=dict)
    # A rank has died or is stuck, and the report says which.
    lost: bool = False
    # The example in which it was lost.
    example: str = ""


def judge_example(outcomes: Sequence[ExampleOutcome]) -> JudgedExample:
    """Combine the outcomes of all ranks: failures outweigh skips, skips rejections, and rejections interruptions."""
    kinds = {outcome.kind for outcome in outcomes}
    order = (ExampleKind.FAILED, ExampleKind.SKIPPED, ExampleKind.REJECTED, ExampleKind.INTERRUPTED)
    heaviest = next((kind for kind in order if kind in kinds), ExampleKind.PASSED)
    return JudgedExample(heaviest, tuple(outcomes))


def line_of(outcome: ExampleOutcome) -> str:
    """Return how the example ended in one rank, on one line."""
    ending: str = outcome.kind.value
    first = _first_line(outcome.summary)
    if outcome.kind is ExampleKind.INTERRUPTED or not first:
        # The error by which an interrupted wait ended says nothing.
        return ending
    return f"{ending}: {first}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
