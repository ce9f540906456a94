"""A finding: what is wrong with the collectives of a test, in which ranks, and at which lines."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_testing_ext._collectives.records.issued_calls import Call, RankRecord, SharedGroup
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.words import MOST_LINES, few, grouped, list_of

# The calls of each rank in a group, and one call of each.
CallsByRank = Mapping[int, Sequence[Call]]
CallOfRank = Mapping[int, Call]
# The ranks that have ended, and how.
Ended = Mapping[int, str]
# The most ways to call that a mismatch shows.
MOST_WAYS = 4


class FindingKind(enum.Enum):
    """The kind of a mistake in the collectives of a test."""

    MISMATCH = "mismatch"
    DEADLOCK = "deadlock"
    ABANDONED = "abandoned"
    # Members of a group that hangs have not come to the latest call of the others.
    BEHIND = "behind"
    # A call that lacks its peers, although all ranks have passed.
    UNMATCHED = "unmatched"
    # Opposite orders that happened to pass.
    ORDER = "order"
    # Tensors that ranks must hold alike.
    DIVERGED = "diverged"
    UNWAITED = "unwaited"
    RACE = "race"
    NAN = "nan"
    # The sanitizer itself has failed.
    RECORDER = "recorder"


class Doing(NamedTuple):
    """The call or the fault of one rank, as a line of a finding."""

    rank: int
    did: str
    site: Site | None
    # The ranks for which it waits.
    awaited: tuple[int, ...] = ()
    # The call in which it waits for them.
    call: str = ""
    # What it did in fewer words.
    short: str = ""

    def __str__(self) -> str:
        return self.line_of([self.rank])

    @property
    def brief(self) -> str:
        """The call alone, of a rank that waits in one; or what tells it from the calls of other ranks."""
        return f"in {self.call}" if self.call else self.short

    def line_of(self, ranks: Sequence[int]) -> str:
        """The line for several ranks that did the same."""
        return f"{list_of(ranks)}: {self.did}" + (f"   {self.site}" if self.site else "")


@dataclass(frozen=True)
class Finding:
    """One mistake: a sentence for the title, lines with each rank's call, and the rank that is blamed first."""

    kind: FindingKind
    sentence: str
    lines: tuple[str | Doing, ...]
    ranks: tuple[int, ...]
    # Only to be said: the test passes.
    is_hazard: bool = False
    # Ranks that have not come to the call yet.
    awaited: tuple[int, ...] = ()
    # The calls of the ranks until then, side by side.
    table: tuple[str, ...] = ()
    # A shorter sentence, which begins with the ranks that are blamed.
    brief: str = ""

    @property
    def title(self) -> str:
        return self.brief or self.sentence

    @property
    def sites(self) -> list[Site]:
        """The lines of the program that it is about."""
        return [line.site for line in self.lines if isinstance(line, Doing) and line.site is not None]

    @property
    def gravity(self) -> int:
        """Of several findings, the one with the smallest number decides."""
        return len(FindingKind) - list(FindingKind).index(self.kind)

    @property
    def text(self) -> str:
        return f"=> {self.sentence}\n{self.calls}"

    @property
    def calls(self) -> str:
        lines = "\n".join(f"  {line}" for line in few(self._folded()))
        if not self.table:
            return lines
        rows = "\n".join(f"  {row}" for row in self.table)
        return f"{lines}\n\n{rows}"

    def _folded(self) -> list[str]:
        """The lines; of many ranks, those that did the same at one place share one, those that are blamed first."""
        if len(self.lines) <= MOST_LINES:
            return [str(line) for line in self.lines]
        in_order = sorted(self.lines, key=lambda line: isinstance(line, Doing) and line.rank not in self.ranks)
        alike = grouped((line[1:] if isinstance(line, Doing) else line, line) for line in in_order)
        folded = []
        for lines in alike.values():
            first = lines[0]
            ranks = [line.rank for line in lines if isinstance(line, Doing)]
            folded.append(first.line_of(ranks) if isinstance(first, Doing) else first)
        return folded


class Candidate(NamedTuple):
    """A finding, and the number of the call that it is about among those of its rank."""

    order: int
    finding: Finding


def first_of(candidates: Sequence[Candidate]) -> Finding | None:
    """The finding about the call that was issued first."""
    if not candidates:
        return None
    return min(candidates, key=lambda candidate: candidate.order).finding


def calls_in(group: SharedGroup, by_rank: Mapping[int, RankRecord]) -> dict[int, Sequence[Call]]:
    """The calls of each member whose record is known."""
    return {rank: by_rank[rank].calls.get(group.key, ()) for rank in group.ranks if rank in by_rank}


def calls_at(place: int, calls: CallsByRank) -> dict[int, Call]:
    """The call of this number, of each rank that has come to it."""
    return {rank: issued[place - 1] for rank, issued in calls.items() if len(issued) >= place}


def of_named_group(group: SharedGroup) -> str:
    return "" if group.title == "the default group" else f" of {group.title}"


def doings_of(calls: CallOfRank) -> tuple[Doing, ...]:
    return tuple(Doing(rank, described(call), call.site) for rank, call in sorted(calls.items()))


def described(call: Call) -> str:
    # A rank of a scatter is known by what it receives: only its root gives anything.
    into = ["into"] if call.kind == "scatter" and call.inputs else []
    return " ".join([call.kind, *into, *call.inputs, *call.details]).rstrip()
