"""Proof that running ranks are at fault, and waits at a store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_testing_ext._process.source_files import is_library
from torch_testing_ext._process.words import grouped, list_of, verb_for

from .blocked import RankState, why_not_blocked
from .failure import Site
from .findings import (
    Ended,
    Finding,
    FindingKind,
    Records,
    Wait,
    deadlocked,
    describe_deadlock,
    first_mismatch,
    waiting_calls,
)
from .records import OWN, STORE, Call, GroupKey, GroupRecord, RankRecord, SharedGroup

RecordsByRank = Mapping[int, RankRecord]
WaitsByRank = Mapping[int, list[Wait]]

# --------------------------------------------------------------------------------------------------------------------
# Waits at a store: for a key, or for the other members of a group that a rank makes.

# The number of such a wait among the calls of a rank: nothing comes after it.
_LATEST = 1_000_000_000


def waits_at_stores(running: RecordsByRank, known: Iterable[RankRecord]) -> dict[int, Wait]:
    """The ranks that wait at a store, each with the ranks that may end that: members of its group, or any rank.

    A process that a rank has started may set a key, too.
    """
    records = {record.rank: record for record in known}
    everybody = _everybody(records.values())
    may_be_set = any(record.state is not None and record.state.children for record in running.values())
    waits = {}
    for rank, record in running.items():
        state = record.state
        if state is None or state.at_store is None:
            continue
        making = record.creating
        if making is None:
            if state.waits_at_store and not may_be_set:
                waits[rank] = _wait(record, state, STORE, "a store", everybody, _others(rank, everybody))
        elif not making.is_default:
            peers = [member for member in making.members if member != rank]
            late = tuple(peer for peer in peers if not _makes(records.get(peer), making))
            waits[rank] = _wait(record, state, "new_group", making.title, making.members, late)
    return {rank: wait for rank, wait in waits.items() if wait.missing}


def _wait(
    record: RankRecord, state: RankState, kind: str, title: str, members: tuple[int, ...], missing: tuple[int, ...]
) -> Wait:
    """The wait of a rank at a store. Any rank may set a key; a group needs all of its members."""
    sites = [Site(*frame) for frame in state.frames if not is_library(frame[0])]
    call = Call(
        kind,
        order=_LATEST + len(record.groups),
        timeout=math.inf if state.at_store is None else state.at_store,
        site=sites[0] if sites else None,
    )
    group = SharedGroup(GroupKey(title, 0, "store"), title, members)
    is_for_key = kind == STORE
    any_of = bool(missing) and kind in (STORE, OWN)
    return Wait(record.rank, group, call, missing, any_of, keys=state.keys if is_for_key else ())


def _everybody(known: Iterable[RankRecord]) -> tuple[int, ...]:
    members = {member for record in known for group in record.groups.values() for member in group.members}
    return tuple(sorted(members))


def _others(rank: int, everybody: Iterable[int]) -> tuple[int, ...]:
    return tuple(other for other in everybody if other != rank)


def waits_in_own_process(running: RecordsByRank, known: Iterable[RankRecord]) -> dict[int, Wait]:
    """The ranks that wait for something of their own process. Any other rank may send a signal that ends that.

    So may the end of a call, by a callback: if the end of one is not known, no rank is missing. Those that a log says
    the rank has waited for are over, unless another thread waits for them.
    """
    everybody = _everybody(known)
    waits = {}
    for rank, record in running.items():
        state = record.state
        if state is None or not state.waits_in_own_process:
            continue
        calls = [call for in_group in record.calls.values() for call in in_group]
        may_end = any(not call.tells_end and (state.others or not call.blocks) for call in calls)
        missing = () if may_end or record.creating is not None else _others(rank, everybody)
        waits[rank] = _wait(record, state, OWN, "its process", everybody, missing)
    return waits


def _makes(record: RankRecord | None, group: GroupRecord) -> bool:
    """Does a rank make this group now, or has it made it?"""
    if record is None:
        return False
    return any(other.members == group.members for other in _of_that_name(record, group))


def suspected_creation(records: Records) -> Finding | None:
    """Suspect the members for which a rank that makes a group waits: they make another one, or none."""
    making: dict[int, GroupRecord] = {}
    for record in records:
        if record.creating is not None and not record.creating.is_default:
            making[record.rank] = record.creating
    for group in making.values():
        of_that_name = [(record.rank, other) for record in records for other in _of_that_name(record, group)]
        unlike = [rank for rank, other in of_that_name if _are_unlike(group, other)]
        alike = [rank for rank, other in of_that_name if other.members == group.members]
        if unlike:
            return _unlike([(rank, other) for rank, other in of_that_name if rank in unlike or rank in alike])
    known = {record.rank for record in records}
    for group in making.values():
        makers = [record.rank for record in records if _of_that_name(record, group)]
        absent = sorted(known.intersection(group.members).difference(makers))
        if absent:
            return _absent(group, [rank for rank in makers if rank in making], absent)
    return None


def _absent(group: GroupRecord, makers: Sequence[int], absent: Sequence[int]) -> Finding:
    """The finding about members that have not begun to make a group."""
    are = verb_for(makers, "is", "are")
    have = verb_for(absent, "has", "have")
    title = f"{group.title} ({list_of(group.members)})"
    sentence = f"{list_of(makers)} {are} creating {title}; {list_of(absent)} {have} not started to create it"
    return Finding(FindingKind.DEADLOCK, f"suspected deadlock: {sentence}", (sentence,), tuple(absent))


def _of_that_name(record: RankRecord, group: GroupRecord) -> list[GroupRecord]:
    """The latest group of that name and world that a rank has made, or makes now."""
    identity = (group.name, group.world)
    making = record.creating
    if making is not None and (making.name, making.world) == identity:
        return [making]
    made = [other for other in record.groups.values() if (other.name, other.world) == identity]
    return made[-1:]


def _are_unlike(first: GroupRecord, second: GroupRecord) -> bool:
    """Do two groups of one name have other members, some in common? Ranks may split into groups of the same name."""
    return first.members != second.members and not set(first.members).isdisjoint(second.members)


def _unlike(groups: Sequence[tuple[int, GroupRecord]]) -> Finding:
    by_members = grouped((group.members, rank) for rank, group in groups)
    by_ranks = sorted((ranks, members) for members, ranks in by_members.items())
    (first_ranks, first_members), *others = by_ranks
    parts = [
        f"{list_of(ranks)} {verb_for(ranks, 'creates', 'create')} one of {list_of(members)}"
        for ranks, members in others
    ]
    create = verb_for(first_ranks, "creates", "create")
    sentence = f"{list_of(first_ranks)} {create} a group of {list_of(first_members)}, but {', '.join(parts)}"
    title = groups[0][1].title
    lines = tuple(f"{list_of(ranks)}: {title} of {list_of(members)}" for ranks, members in by_ranks)
    return Finding(FindingKind.DEADLOCK, f"suspected deadlock: {sentence}", lines, tuple(first_ranks[:1]))


# --------------------------------------------------------------------------------------------------------------------
# Proof that the collectives of running ranks are at fault, from probes of the ranks. Pure.
#
# One probe may show that ranks disagree. Two may show that ranks wait for ever, for each other or for one that has
# ended. What cannot be proven waits for the time-out of the test.
#
# **Theorem.** Two probes saw each rank of a set S in the same state, with the same calls:
#
# 1. each of its calls that are not known to be over lacks a member that is in S as well, or has ended; a receive from
#    any rank lacks all of its possible senders in this way (`findings.deadlocked`);
# 2. none of these calls has a time-out that ends before the test does (`ProofRules.endless`);
# 3. no thread of it that may issue a call can go on, except by the end of one of these calls
#    (`blocked.why_not_blocked`).
#
# Then no rank of S ever issues another call, and none of these calls ever ends.
#
# Proof: suppose that one ends, and take the first. Its missing member, or one of them, has issued it meanwhile. A
# member that has ended issues nothing. One in S would have gone on before any of its own calls ended, which 3
# excludes.
#
# **Assumptions**, any of which could make it wrong:
#
# - A rank's calls are all recorded: torch's recorder, or the log, has dropped none (`RankRecord.is_whole`). We note
#   gloo's sends and receives, which the recorder leaves out; those that we have not seen, such as those of compiled
#   code, are noticed by gaps in the sequence numbers (`RankState.p2p`). They do not matter while the main thread waits
#   for the work of a collective, which is one of the recorded calls, and no other thread may wait for a message
#   (`RankState.in_collective`). A send returns only when its message is received: gloo waits for that.
# - Groups are the same in all ranks if their names, worlds and generations are (`records.shared_groups`).
# - A call of a group ends only when all members have issued it. This holds for the collectives that gloo and threads
#   execute. The source of a broadcast needs nobody, and the recorder shows that its call is over.
# - A log does not know when calls end: one that all members have issued counts as over, since it ends by itself. Ranks
#   that wait in such a call are not told from ranks that wait in another one.
# - The probes of the ranks need not be simultaneous: 1 and 3 hold for each rank from its first probe to its second one,
#   and the first probes of all ranks come before the second ones.
# - A thread that sleeps in a private futex without a time-out is woken only by threads of its own process. Those of
#   gloo, known by their names or their loop, only end calls. What a Python thread can reach by its stack is all that it
#   may do (`blocked.can_reach`).
# - Nothing outside of the test acts: no debugger, no process that sends signals, other than those that the rank
#   started.
#
# `why_not_blocked` reads what the kernel shows of threads, so on systems other than Linux on x86-64 and arm64 nothing
# is proven.

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
    waiting = {rank: calls for rank, calls in waiting_calls(known).items() if rank in running}
    mismatch = endless_mismatch(known, [wait.call for calls in waiting.values() for wait in calls], rules)
    if mismatch is not None:
        return _conclude_mismatch(before, mismatch, ended)
    waiting = _with_waits_at_stores(_without_others(waiting, running), running, known)
    suspects = _suspects(waiting, ended, rules)
    calls = frozenset((rank, wait.call.order) for rank, in_calls in waiting.items() for wait in in_calls)
    evidence = replace(before, records=running, waits=calls)
    if calls != before.waits:
        return Conclusion(evidence, is_suspicious=bool(suspects))
    doubts = _doubts(suspects, before, running)
    certain = {rank: waiting[rank] for rank in suspects if rank not in doubts}
    proven = deadlocked(certain, ended)
    if any(not wait.is_own for wait in proven.values()):
        return Conclusion(before, describe_deadlock(proven, ended))
    return Conclusion(evidence, doubt=next(iter(doubts.values()), ""))


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


def _with_waits_at_stores(waiting: WaitsByRank, running: RecordsByRank, known: Records) -> dict[int, list[Wait]]:
    """The waits of each rank, with those at stores."""
    all_waits = dict(waiting)
    for rank, wait in waits_at_stores(running, known).items():
        # What its main thread has issued before does not matter; another thread may wait for it.
        state = running[rank].state
        has_other_threads = state is not None and bool(state.others)
        of_other_threads = waiting.get(rank, []) if has_other_threads else []
        all_waits[rank] = [*of_other_threads, wait]
    for rank, wait in waits_in_own_process(running, known).items():
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
