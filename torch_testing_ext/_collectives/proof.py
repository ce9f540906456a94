"""Proof that the collectives of running ranks are at fault, from probes of the ranks. Pure.

One probe may show that ranks disagree. Two may show that ranks wait for ever, for each other or for one that has ended.
What cannot be proven waits for the time-out of the test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .blocked import RankState, why_not_blocked
from .findings import Finding, Wait, deadlocked, describe_deadlock, first_mismatch, waits
from .records import RankRecord

DEFAULT_OF_GROUPS = 1800.0  # gloo's time-out: ranks that have not chosen another do not wait for it


@dataclass(frozen=True)
class ProofRules:
    """The settings of a test that decide what counts as proof.

    `endless`: a collective whose time-out is at least this many seconds does not end by itself before the test does.
    """

    endless: float
    may_differ: bool = False


@dataclass(frozen=True)
class Evidence:
    """The results of the probes so far."""

    records: Mapping[int, RankRecord] = field(default_factory=dict)
    waits: frozenset[tuple[int, int]] = frozenset()  # the calls that each rank waited in
    has_mismatch: bool = False  # seen once: by now the others may have come to the call, or answered


@dataclass(frozen=True)
class Conclusion:
    """A finding, or the evidence so far; if that is suspicious, the same ranks are to be probed again soon."""

    evidence: Evidence
    finding: Finding | None = None
    is_suspicious: bool = False


def conclude(
    before: Evidence,
    running: Mapping[int, RankRecord],
    left: Mapping[int, RankRecord | None],
    ended: Mapping[int, str],
    rules: ProofRules,
) -> Conclusion:
    """Judge one probe. `running`: the answers of ranks; `left`: what others have left; `ended`: how these ended."""
    known = [*running.values(), *(record for record in left.values() if record is not None)]
    waiting = {rank: calls for rank, calls in waits(known).items() if rank in running}
    mismatch = _mismatch(known, waiting, rules)
    if mismatch is not None:
        if before.has_mismatch or ended.keys() >= set(mismatch.awaited):
            return Conclusion(before, mismatch)
        return Conclusion(replace(before, has_mismatch=True), is_suspicious=True)
    calls = frozenset((rank, wait.call.order) for rank, each in waiting.items() for wait in each)
    suspects = deadlocked({rank: each for rank, each in waiting.items() if _are_endless(each, rules.endless)}, ended)
    if calls == before.waits:
        blocked = {
            rank: waiting[rank]
            for rank in suspects
            if why_not_blocked(_state(before.records.get(rank)), running[rank].state) is None
        }
        if proven := deadlocked(blocked, ended):
            return Conclusion(before, describe_deadlock(proven, ended))
    evidence = replace(before, records=running, waits=calls)
    return Conclusion(evidence, is_suspicious=bool(suspects) and calls != before.waits)


def _mismatch(known: Sequence[RankRecord], waiting: Mapping[int, Sequence[Wait]], rules: ProofRules) -> Finding | None:
    """The first mismatch. A test of a group's own time-out goes on by itself: its end shows what the mismatch means."""
    is_endless = all(_are_endless(each, min(rules.endless, DEFAULT_OF_GROUPS)) for each in waiting.values())
    return None if rules.may_differ or not is_endless else first_mismatch(known, unless_raised=True)


def _are_endless(calls: Sequence[Wait], endless: float) -> bool:
    return all(wait.call.timeout >= endless for wait in calls)


def _state(record: RankRecord | None) -> RankState | None:
    return record.state if record is not None else None
