"""Proof that the collectives of running ranks are at fault, from probes of the ranks. Pure.

One probe may show that ranks disagree. Two may show that ranks wait for ever, for each other or for one that has ended.
What cannot be proven waits for the time-out of the test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .blocked import why_not_blocked
from .creation import waits_at_stores
from .findings import Finding, deadlocked, describe_deadlock, first_mismatch, waits
from .records import Call, RankRecord

# The shortest default of a backend, NCCL's: ranks that have not chosen another time-out do not wait for it.
DEFAULT_OF_GROUPS = 600.0


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
    doubt: str = ""  # what keeps a deadlock from being proven


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
    mismatch = endless_mismatch(known, [wait.call for calls in waiting.values() for wait in calls], rules)
    if mismatch is not None:
        if before.has_mismatch or ended.keys() >= set(mismatch.awaited):
            return Conclusion(before, mismatch)
        return Conclusion(replace(before, has_mismatch=True), is_suspicious=True)
    for rank, wait in waits_at_stores(running, known).items():
        # What its main thread has issued before does not matter; another thread may wait for it.
        state = running[rank].state
        kept = waiting.get(rank, []) if state is not None and state.others else []
        waiting[rank] = [*kept, wait]
    calls = frozenset((rank, wait.call.order) for rank, each in waiting.items() for wait in each)
    endless = {r: each for r, each in waiting.items() if all(wait.call.timeout >= rules.endless for wait in each)}
    suspects = deadlocked(endless, ended)
    doubt = ""
    if calls == before.waits:
        earlier = {rank: record.state for rank, record in before.records.items()}
        why = {rank: why_not_blocked(earlier.get(rank), running[rank].state) for rank in sorted(suspects)}
        if proven := deadlocked({rank: waiting[rank] for rank in suspects if why[rank] is None}, ended):
            return Conclusion(before, describe_deadlock(proven, ended))
        doubt = next((f"rank {rank}: {reason}" for rank, reason in why.items() if reason is not None), "")
    evidence = replace(before, records=running, waits=calls)
    return Conclusion(evidence, is_suspicious=bool(suspects) and calls != before.waits, doubt=doubt)


def endless_mismatch(known: Sequence[RankRecord], latest: Iterable[Call], rules: ProofRules) -> Finding | None:
    """The first mismatch. A test of a group's own time-out goes on by itself: its end shows what the mismatch means."""
    is_endless = all(call.timeout >= min(rules.endless, DEFAULT_OF_GROUPS) for call in latest)
    return None if rules.may_differ or not is_endless else first_mismatch(known, unless_raised=True)
