"""Ranks that wait for each other, or for a rank that has ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch_testing_ext._collectives.records.issued_calls import INIT, OWN, STORE, shared_groups, whole_records
from torch_testing_ext._process.words import grouped, list_of, verb_for
from torch_testing_ext._tests.outcomes import TestOutcome

from .finding import MOST_WAYS, Doing, Ended, Finding, FindingKind, calls_at, calls_in, of_named_group
from .message_pairs import Records, Wait, unpaired

_LONGEST_CYCLE = 5
# What keeps the waits going that are no calls of others.
WHY_NO_CALL_ENDS = {OWN: "which nothing in the process ends", STORE: "which nobody sets", INIT: "as which nobody joins"}


def waiting_calls(records: Records) -> dict[int, list[Wait]]:
    """The collectives of each rank that are not over, in the order of the calls.

    A member of whose collectives nothing is known counts as missing.
    """
    by_rank = whole_records(records)
    all_waits: list[Wait] = []
    for group in shared_groups(records):
        issued = calls_in(group, by_rank)
        counts = {rank: len(issued.get(rank, ())) for rank in group.ranks}
        least = min(counts.values())
        for rank, calls in issued.items():
            if by_rank[rank].has_destroyed(group.key):
                continue
            for call in calls:
                if call.is_over:
                    continue
                missing: tuple[int, ...] = ()
                if call.place > least:
                    missing = tuple(member for member, count in counts.items() if count < call.place)
                if missing or call.tells_end:
                    all_waits.append(Wait(rank, group, call, missing))
    all_waits += [wait for wait in unpaired(records) if not wait.call.is_over]
    in_order = sorted(all_waits, key=lambda wait: wait.call.order)
    return grouped((wait.rank, wait) for wait in in_order)


def deadlocked(waiting: Mapping[int, Sequence[Wait]], ended: Ended) -> dict[int, Wait]:
    """The ranks that cannot go on if each waits for one of its collectives, with the one that keeps it from going on.

    `ended`: the ranks that issue nothing any more. A rank may go on as long as one of its collectives lacks no member,
    and is just being executed, or lacks only ranks that may go on.
    """
    left = dict(waiting)
    while True:
        free = []
        for rank, calls in left.items():
            if not all(_never_ends(wait, left, ended) for wait in calls):
                free.append(rank)
        if not free:
            return {rank: calls[-1] for rank, calls in left.items()}
        for rank in free:
            del left[rank]


def _never_ends(wait: Wait, left: Mapping[int, object], ended: Ended) -> bool:
    never = (member in left or member in ended for member in wait.missing)
    return all(never) if wait.any_of else any(never)


def describe_deadlock(
    deadlocked: Mapping[int, Wait], ended: Ended, suspected: bool = False, records: Records = ()
) -> Finding:
    """The finding about ranks that cannot go on: abandoned by a rank that has ended, or in a cycle.

    `records`: what all ranks have issued, which may show that the rank that has ended is wrong.
    """
    lines = tuple(_waiting(rank, wait) for rank, wait in sorted(deadlocked.items()))
    abandoned = _abandoned(deadlocked, ended, lines, records)
    if abandoned is not None:
        return abandoned
    causes = {rank: wait for rank, wait in deadlocked.items() if not wait.is_in_call}
    if causes:
        return _waits_that_nobody_ends(causes, deadlocked, lines, suspected)
    cycle = _cycle(deadlocked)
    parts: list[str] = []
    for rank, then in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        wait = deadlocked[rank]
        subject = "which" if parts else f"rank {rank}"
        parts.append(f"{subject} {_waits_in(wait)} for rank {then}")
    if len(parts) > _LONGEST_CYCLE:
        hidden = len(parts) - _LONGEST_CYCLE
        parts[_LONGEST_CYCLE - 1 : -1] = [f"which waits for {hidden + 1} more ranks"]
    sentence = ", ".join(parts)
    if suspected:
        sentence = f"suspected deadlock: {sentence}"
    return Finding(FindingKind.DEADLOCK, sentence, lines, tuple(cycle))


def _waits_that_nobody_ends(
    causes: Mapping[int, Wait], deadlocked: Mapping[int, Wait], lines: tuple[Doing, ...], suspected: bool
) -> Finding:
    """The finding about ranks that wait for keys, for a default group, or in themselves: nobody is left to end that."""
    sentences = []
    for kind, why in WHY_NO_CALL_ENDS.items():
        waits = {rank: wait for rank, wait in causes.items() if wait.call.kind == kind}
        if waits:
            sentences.append(f"{ranks_that_wait(waits)}, {why}")
    sentence = "; ".join(sentences)
    others = [rank for rank in sorted(deadlocked) if rank not in causes]
    if others:
        calls = list(dict.fromkeys(_call_in_group(deadlocked[rank]) for rank in others))
        sentence += f"; {list_of(others)} {verb_for(others, 'waits', 'wait')} in {', '.join(calls[:MOST_WAYS])}"
    if suspected:
        sentence = f"suspected deadlock: {sentence}"
    return Finding(FindingKind.DEADLOCK, sentence, lines, tuple(sorted(causes)))


def ranks_that_wait(waits: Mapping[int, Wait]) -> str:
    """The ranks with these waits, which are all of a kind, for what, and where."""
    alike = grouped(((wait.cause, wait.in_line), rank) for rank, wait in sorted(waits.items()))
    parts = [
        f"{list_of(ranks)} {verb_for(ranks, 'waits', 'wait')} for {cause}{line}"
        for (cause, line), ranks in alike.items()
    ]
    hidden = len(parts) - MOST_WAYS
    if hidden > 0:
        parts[MOST_WAYS:] = [f"{hidden} more wait"]
    return ", ".join(parts)


def _call_in_group(wait: Wait) -> str:
    return f"{wait.name}{of_named_group(wait.group)}"


def _waiting(rank: int, wait: Wait) -> Doing:
    call = _call_in_group(wait) if wait.is_in_call else wait.name
    awaited = f"{list_of(wait.missing)} in {call}" if wait.is_in_call else wait.cause
    return Doing(rank, f"waiting for {awaited}", wait.call.site, tuple(wait.missing), call)


def _abandoned(
    deadlocked: Mapping[int, Wait], ended: Ended, lines: tuple[Doing, ...], records: Records
) -> Finding | None:
    for _, wait in sorted(deadlocked.items()):
        gone = () if wait.is_own or wait.is_in_init else tuple(rank for rank in wait.missing if rank in ended)
        if gone:
            waiting = [rank for rank, other in deadlocked.items() if _is_same_call(other, wait)]
            return abandoned_by(gone, ended, wait, waiting, deadlocked, lines, records)
    return None


def abandoned_by(
    gone: tuple[int, ...],
    ended: Ended,
    wait: Wait,
    waiting: Sequence[int],
    waits: Mapping[int, Wait],
    lines: tuple[Doing, ...],
    records: Records,
) -> Finding:
    """The finding about ranks that ended without the call in which `waiting` are. `waits`: of all ranks that wait.

    Where others wait for those, the chain is told from its other end: which of its ranks is wrong is not known, unless
    groups of the same name, as of a dimension of a mesh, show it.
    """
    chain = _chain_to(wait, waits)
    if len(chain) == 1 or _is_made_in_like_groups(wait, records):
        sentence = sentence_of_abandoned(gone, ended, wait, waiting)
        return Finding(FindingKind.ABANDONED, sentence, lines, gone)
    steps: list[str] = []
    for step, then in zip(chain, [*([next_one.rank] for next_one in chain[1:]), gone], strict=True):
        subject = "which" if steps else f"rank {step.rank}"
        steps.append(f"{subject} {_waits_in(step)} for {list_of(then)}")
    how = ended[gone[0]]
    left = verb_for(gone, "has left", "have left") if how == TestOutcome.PASSED.value else how
    ranks = tuple(step.rank for step in chain)
    return Finding(FindingKind.ABANDONED, f"{', '.join(steps)}, which {left}", lines, ranks)


def _is_made_in_like_groups(wait: Wait, records: Records) -> bool:
    """Whether there are other groups of this name, and each of their members has issued the call that is waited in."""
    if not wait.is_in_call or wait.call.is_p2p:
        return False
    by_rank = whole_records(records)
    like = [
        group
        for group in shared_groups(records)
        if group.title == wait.group.title and group.key != wait.group.key and len(group.ranks) == len(wait.group.ranks)
    ]
    issued = [calls_at(wait.call.place, calls_in(group, by_rank)) for group in like]
    return bool(like) and all(
        calls.keys() == set(group.ranks) and all(call.kind == wait.call.kind for call in calls.values())
        for group, calls in zip(like, issued, strict=True)
    )


def _chain_to(wait: Wait, waits: Mapping[int, Wait]) -> list[Wait]:
    """The longest chain of ranks, by their numbers, of which each waits for the next one, to the rank of this wait."""
    chain = [wait]
    while True:
        known = {step.rank for step in chain}
        before = (
            other
            for rank, other in sorted(waits.items())
            if rank not in known and chain[0].rank in other.missing and not other.any_of
        )
        earlier = next(before, None)
        if earlier is None:
            return chain
        chain.insert(0, earlier)


def _waits_in(wait: Wait) -> str:
    return f"waits in {wait.group.title} ({wait.name}, {wait.call.line})"


def _is_same_call(first: Wait, second: Wait) -> bool:
    if first.call.is_p2p or second.call.is_p2p:
        # Each message has a place of its own between two ranks.
        return first is second
    return first.group.key == second.group.key and first.call.place == second.call.place


def sentence_of_abandoned(gone: Sequence[int], ended: Ended, wait: Wait, waiting: Sequence[int]) -> str:
    """Name the ranks that ended without the collective that others wait in."""
    how = ended[gone[0]]
    left = f"{list_of(gone)} {'left' if how == TestOutcome.PASSED.value else how}"
    if wait.is_at_store:
        return (
            f"{left} without setting {wait.cause}; {are_waiting(waiting)} for {'them' if len(wait.keys) > 1 else 'it'}"
        )
    if wait.call.is_p2p:
        doing = "receiving" if wait.call.kind == "send" else "sending"
        return f"{left} without {doing}; {are_waiting(waiting)} in {wait.name}"
    return f"{left} before {_call_in_group(wait)}; {are_waiting(waiting)} in it"


def are_waiting(ranks: Collection[int]) -> str:
    return f"{list_of(list(ranks))} {verb_for(ranks, 'is', 'are')} waiting"


def _cycle(deadlocked: Mapping[int, Wait]) -> list[int]:
    """Follow each rank to the first that it waits for until one comes again."""
    path: list[int] = []
    rank = min(deadlocked)
    while rank not in path:
        path.append(rank)
        rank = next(member for member in deadlocked[rank].missing if member in deadlocked)
    return path[path.index(rank) :]
