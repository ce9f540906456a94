"""Proof that the collectives of running ranks are at fault, from probes of the ranks. Pure.

One probe may show that ranks disagree. Two may show that ranks wait for ever, for each other or for one that has ended.
What cannot be proven waits for the time-out of the test.

**Theorem.** Two probes saw each rank of a set S in the same state, with the same calls:

1. each of its calls that are not known to be over lacks a member that is in S as well, or has ended; a receive from any
   rank lacks all of its possible senders in this way (`findings.deadlocked`);
2. none of these calls has a time-out that ends before the test does (`ProofRules.endless`);
3. no thread of it that may issue a call can go on, except by the end of one of these calls (`blocked.why_not_blocked`).

Then no rank of S ever issues another call, and none of these calls ever ends.

Proof: suppose that one ends, and take the first. Its missing member, or one of them, has issued it meanwhile. A member
that has ended issues nothing. One in S would have gone on before any of its own calls ended, which 3 excludes.

**Assumptions**, any of which could make it wrong:

- A rank's calls are all recorded: torch's recorder, or the log, has dropped none (`RankRecord.is_whole`), and gloo's
  sends and receives, which the recorder leaves out, are noticed by gaps in the sequence numbers (`RankState.p2p`).
- Groups are the same in all ranks if their names, worlds and generations are (`records.shared_groups`).
- A call of a group ends only when all members have issued it. This holds for the collectives that gloo and threads
  execute. The source of a broadcast needs nobody, and the recorder shows that its call is over.
- A log does not know when calls end: one that all members have issued counts as over, since it ends by itself. Ranks
  that wait in such a call are not told from ranks that wait in another one.
- The probes of the ranks need not be simultaneous: 1 and 3 hold for each rank from its first probe to its second one,
  and the first probes of all ranks come before the second ones.
- A thread that sleeps in a private futex without a time-out is woken only by threads of its own process. Those of gloo,
  known by their names or their loop, only end calls. What a Python thread can reach by its stack is all that it may do
  (`launch.reach`).
- Nothing outside of the test acts: no debugger, no process that sends signals, other than those that the rank started.

`why_not_blocked` reads what the kernel shows of threads, so on systems other than Linux on x86-64 and arm64 nothing is
proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .blocked import why_not_blocked
from .creation import waits_at_stores
from .findings import Finding, deadlocked, describe_deadlock, first_mismatch, waits
from .pairs import Wait
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
    # The calls that each rank waited in.
    waits: frozenset[tuple[int, int]] = frozenset()
    # Seen once: by now the others may have come to the call, or answered.
    has_mismatch: bool = False


@dataclass(frozen=True)
class Conclusion:
    """A finding, or the evidence so far; if that is suspicious, the same ranks are to be probed again soon."""

    evidence: Evidence
    finding: Finding | None = None
    is_suspicious: bool = False
    # What keeps a deadlock from being proven.
    doubt: str = ""


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
        return _conclude_mismatch(before, mismatch, ended)
    waiting = _with_waits_at_stores(waiting, running, known)
    suspects = _suspects(waiting, ended, rules)
    calls = frozenset((rank, wait.call.order) for rank, in_calls in waiting.items() for wait in in_calls)
    evidence = replace(before, records=running, waits=calls)
    if calls != before.waits:
        return Conclusion(evidence, is_suspicious=bool(suspects))
    doubts = _doubts(suspects, before, running)
    certain = {rank: waiting[rank] for rank in suspects if rank not in doubts}
    proven = deadlocked(certain, ended)
    if proven:
        return Conclusion(before, describe_deadlock(proven, ended))
    return Conclusion(evidence, doubt=next(iter(doubts.values()), ""))


def _conclude_mismatch(before: Evidence, mismatch: Finding, ended: Mapping[int, str]) -> Conclusion:
    """A mismatch counts at once if no member has yet to come, or if it is seen for the second time."""
    all_have_come = ended.keys() >= set(mismatch.awaited)
    if before.has_mismatch or all_have_come:
        return Conclusion(before, mismatch)
    return Conclusion(replace(before, has_mismatch=True), is_suspicious=True)


def _with_waits_at_stores(
    waiting: Mapping[int, list[Wait]], running: Mapping[int, RankRecord], known: Sequence[RankRecord]
) -> dict[int, list[Wait]]:
    """The waits of each rank, with those at stores."""
    all_waits = dict(waiting)
    for rank, wait in waits_at_stores(running, known).items():
        # What its main thread has issued before does not matter; another thread may wait for it.
        state = running[rank].state
        has_other_threads = state is not None and bool(state.others)
        of_other_threads = waiting.get(rank, []) if has_other_threads else []
        all_waits[rank] = [*of_other_threads, wait]
    return all_waits


def _suspects(waiting: Mapping[int, list[Wait]], ended: Mapping[int, str], rules: ProofRules) -> dict[int, Wait]:
    """The ranks that wait for ever if they do nothing but wait: points 1 and 2 of the theorem."""
    endless = {}
    for rank, in_calls in waiting.items():
        if all(wait.call.timeout >= rules.endless for wait in in_calls):
            endless[rank] = in_calls
    return deadlocked(endless, ended)


def _doubts(suspects: Iterable[int], before: Evidence, running: Mapping[int, RankRecord]) -> dict[int, str]:
    """Why suspects may do something else than wait: point 3 of the theorem. Those that certainly wait are left out."""
    doubts = {}
    for rank in sorted(suspects):
        earlier = before.records.get(rank)
        reason = why_not_blocked(None if earlier is None else earlier.state, running[rank].state)
        if reason is not None:
            doubts[rank] = f"rank {rank}: {reason}"
    return doubts


def endless_mismatch(known: Sequence[RankRecord], latest: Iterable[Call], rules: ProofRules) -> Finding | None:
    """The first mismatch. A test of a group's own time-out goes on by itself: its end shows what the mismatch means."""
    shortest = min(rules.endless, DEFAULT_OF_GROUPS)
    is_endless = all(call.timeout >= shortest for call in latest)
    if rules.may_differ or not is_endless:
        return None
    return first_mismatch(known, unless_raised=True)
