"""The proof that the collectives of running ranks are at fault, from probes of the ranks.

Pure: it knows no process and no clock.

One probe may show that ranks disagree. Two may show that ranks wait for ever, for each other or for one that has ended.
What cannot be proven waits for the time-out of the test.

**Theorem.** Two probes saw each rank of a set S in the same state, with the same calls:

1. each of its calls that are not known to be over lacks a member that is in S as well, or has ended; a receive from any
rank lacks all of its possible senders in this way (`findings.deadlocked`); 2. none of these calls has a time-out that
ends before the test does (`ProofRules.endless`); 3. no thread of it that may issue a call can go on, except by the end
of one of these calls (`blocked.why_not_blocked`).

Then no rank of S ever issues another call, and none of these calls ever ends.

Proof: suppose that one ends, and take the first. Its missing member, or one of them, has issued it meanwhile. A member
that has ended issues nothing. One in S would have gone on before any of its own calls ended, which 3 excludes.

**Assumptions**, any of which could make it wrong:

- A rank's calls are all recorded: torch's recorder, or the log, has dropped none (`RankRecord.is_whole`). We note
gloo's sends and receives, which the recorder leaves out; those that we have not seen, such as those of compiled code,
are noticed by gaps in the sequence numbers (`RankState.p2p`). They do not matter while the main thread waits for the
work of a collective, which is one of the recorded calls, and no other thread may wait for a message
(`RankState.in_collective`). A send returns only when its message is received: gloo waits for that. - Groups are the
same in all ranks if their names, worlds and generations are (`records.shared_groups`). - A call of a group ends only
when all members have issued it. This holds for the collectives that gloo and threads execute. The source of a broadcast
needs nobody, and the recorder shows that its call is over. - A log does not know when calls end: one that all members
have issued counts as over, since it ends by itself. Ranks that wait in such a call are not told from ranks that wait in
another one. - The probes of the ranks need not be simultaneous: 1 and 3 hold for each rank from its first probe to its
second one, and the first probes of all ranks come before the second ones. - A thread that sleeps in a private futex
without a time-out is woken only by threads of its own process. Those of gloo, known by their names or their loop, only
end calls. What a Python thread can reach by its stack is all that it may do (`blocked.can_reach`). - Nothing outside of
the test acts: no debugger, no process that sends signals, other than those that the rank started.

`why_not_blocked` reads what the kernel shows of threads, so on systems other than Linux on x86-64 and arm64 nothing is
proven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch_testing_ext._collectives.blocked.rank_state import why_not_blocked
from torch_testing_ext._collectives.findings.deadlocks import deadlocked, describe_deadlock, waiting_calls
from torch_testing_ext._collectives.findings.finding import Ended, Finding
from torch_testing_ext._collectives.findings.message_pairs import Records, Wait
from torch_testing_ext._collectives.findings.mismatches import first_mismatch
from torch_testing_ext._collectives.findings.other_members import first_unlike_lists
from torch_testing_ext._collectives.records.issued_calls import Call, RankRecord

from .store_waits import RecordsByRank, WaitsByRank, waits_at_stores, waits_in_own_process

# The shortest default of a backend, NCCL's: ranks that have not chosen another time-out do not wait for it.
DEFAULT_OF_GROUPS = 600.0


@dataclass(frozen=True)
class ProofRules:
    """The settings of a test that decide what counts as proof.

    `endless`: a collective whose time-out is at least this many seconds does not end by itself before the test does.
    `ranks`: how many there are, also of those that are in no group. `of_whole_groups`: a rank may die, but those of a
    group whose members all run may not differ.
    """

    endless: float
    may_differ: bool = False
    ranks: int = 0
    of_whole_groups: bool = False


@dataclass(frozen=True)
class Evidence:
    """The results of the probes so far."""

    records: RecordsByRank = field(default_factory=dict)
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


def judge_probe(
    before: Evidence,
    running: RecordsByRank,
    left: Mapping[int, RankRecord | None],
    ended: Ended,
    rules: ProofRules,
) -> Conclusion:
    """Judge one probe. `running`: the answers of ranks; `left`: what others have left; `ended`: how these ended."""
    known = [*running.values(), *(record for record in left.values() if record is not None)]
    unlike = None if rules.may_differ else first_unlike_lists(known)
    if unlike is not None:
        return Conclusion(before, unlike)
    waiting = {rank: calls for rank, calls in waiting_calls(known).items() if rank in running}
    latest = [wait.call for calls in waiting.values() for wait in calls]
    if rules.of_whole_groups:
        mismatch = endless_mismatch(_of_whole_groups(running), latest, replace(rules, may_differ=False))
    else:
        mismatch = endless_mismatch(known, latest, rules)
    if mismatch is not None:
        return _conclude_mismatch(before, mismatch, ended)
    waiting = _with_waits_at_stores(_without_others(waiting, running), running, known, rules.ranks)
    suspects = _suspects(waiting, ended, rules)
    calls = frozenset((rank, wait.call.order) for rank, in_calls in waiting.items() for wait in in_calls)
    evidence = replace(before, records=running, waits=calls)
    if calls != before.waits:
        return Conclusion(evidence, is_suspicious=bool(suspects))
    doubts = _doubts(suspects, before, running)
    certain = {rank: waiting[rank] for rank in suspects if rank not in doubts}
    proven = deadlocked(certain, ended)
    if any(not wait.is_own for wait in proven.values()):
        return Conclusion(before, describe_deadlock(proven, ended, records=known))
    return Conclusion(evidence, doubt=next(iter(doubts.values()), ""))


def _of_whole_groups(running: RecordsByRank) -> list[RankRecord]:
    """The records of these ranks, with the calls of groups all of whose members are among them."""
    present = Counter(key for record in running.values() for key in record.groups)
    whole = []
    for record in running.values():
        kept = {key for key, group in record.groups.items() if present[key] == len(group.members)}
        calls = {key: of for key, of in record.calls.items() if key in kept}
        whole.append(replace(record, calls=calls, messages={}))
    return whole


def _conclude_mismatch(before: Evidence, mismatch: Finding, ended: Ended) -> Conclusion:
    """A mismatch counts at once if no member has yet to come, or if it is seen for the second time."""
    all_have_come = ended.keys() >= set(mismatch.awaited)
    if before.has_mismatch or all_have_come:
        return Conclusion(before, mismatch)
    return Conclusion(replace(before, has_mismatch=True), is_suspicious=True)


def _without_others(waiting: WaitsByRank, running: RecordsByRank) -> dict[int, list[Wait]]:
    """The waits of each rank, without those in which it is known not to be: its only thread waits for another work."""
    seen = {}
    for rank, waits in waiting.items():
        state = running[rank].state
        if state is not None and not state.others:
            if state.message is not None:
                waits = [wait for wait in waits if wait.call.order == state.message]
            elif state.in_collective:
                waits = [wait for wait in waits if not wait.call.is_p2p]
        if waits:
            seen[rank] = waits
    return seen


def _with_waits_at_stores(
    waiting: WaitsByRank, running: RecordsByRank, known: Records, ranks: int
) -> dict[int, list[Wait]]:
    """The waits of each rank, with those at stores."""
    all_waits = dict(waiting)
    for rank, wait in waits_at_stores(running, known, ranks).items():
        # What its main thread has issued before does not matter; another thread may wait for it.
        state = running[rank].state
        has_other_threads = state is not None and bool(state.others)
        of_other_threads = waiting.get(rank, []) if has_other_threads else []
        all_waits[rank] = [*of_other_threads, wait]
    for rank, wait in waits_in_own_process(running, known, waiting, ranks).items():
        all_waits[rank] = [*waiting.get(rank, []), wait]
    return all_waits


def _suspects(waiting: WaitsByRank, ended: Ended, rules: ProofRules) -> dict[int, Wait]:
    """The ranks that wait for ever if they do nothing but wait: points 1 and 2 of the theorem."""
    endless = {}
    for rank, in_calls in waiting.items():
        if all(wait.call.timeout >= rules.endless for wait in in_calls):
            endless[rank] = in_calls
    return deadlocked(endless, ended)


def _doubts(suspects: Iterable[int], before: Evidence, running: RecordsByRank) -> dict[int, str]:
    """Why suspects may do something else than wait: point 3 of the theorem. Those that certainly wait are left out."""
    doubts = {}
    for rank in sorted(suspects):
        earlier = before.records.get(rank)
        reason = why_not_blocked(None if earlier is None else earlier.state, running[rank].state)
        if reason is not None:
            doubts[rank] = f"rank {rank}: {reason}"
    return doubts


def endless_mismatch(known: Records, latest: Iterable[Call], rules: ProofRules) -> Finding | None:
    """The first mismatch. A test of a group's own time-out goes on by itself: its end shows what the mismatch means."""
    shortest = min(rules.endless, DEFAULT_OF_GROUPS)
    is_endless = all(call.timeout >= shortest for call in latest)
    if rules.may_differ or not is_endless:
        return None
    return first_mismatch(known, unless_raised=True)
