"""Sends and receives: which belong together, and which have no partner yet.

Only a log of all calls knows them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch_testing_ext._collectives.records.issued_calls import (
    INIT,
    OWN,
    STORE,
    Call,
    RankRecord,
    SharedGroup,
    shared_groups,
    whole_records,
)
from torch_testing_ext._process.words import list_of

Peer = TypeVar("Peer", int, int | None)
# The records of the ranks of a test.
Records = Sequence[RankRecord]


@dataclass(frozen=True)
class Pair:
    """A send and the receive that gets its message."""

    group: SharedGroup
    source: int
    target: int
    send: Call
    receive: Call

    @property
    def differs(self) -> bool:
        return self.send.agreement_of_message != self.receive.agreement_of_message


@dataclass(frozen=True)
class Wait:
    """A call of a rank, with the members of its group that have not issued it; of a message, its possible partners."""

    rank: int
    group: SharedGroup
    call: Call
    missing: tuple[int, ...]
    # One of the missing is enough: a receive from any rank, a key of a store, or a signal.
    any_of: bool = False
    # The keys of a wait at a store in words, as far as they are known.
    keys: tuple[str, ...] = ()
    # Of messages that a rank receives from any, only the number is known: this may be another one.
    by_number: bool = False
    # The ranks of a new default group that nobody has come as.
    absent: tuple[int, ...] = ()

    @property
    def is_at_store(self) -> bool:
        return self.call.kind == STORE

    @property
    def is_in_init(self) -> bool:
        return self.call.kind == INIT

    @property
    def is_in_call(self) -> bool:
        """Whether this is a collective, a message or the creation of a group, in which certain ranks are missing."""
        return not (self.is_at_store or self.is_in_init or self.is_own)

    @property
    def is_own(self) -> bool:
        return self.call.kind == OWN

    @property
    def cause(self) -> str:
        """The awaited object, if that is no call of others, in words."""
        if self.is_own:
            return "a lock, a queue, an event or a thread of its own"
        if self.is_in_init:
            return f"{list_of(self.absent)} of {len(self.group.ranks)} in {self.group.title}"
        if not self.keys:
            return "a key of a store"
        return f"the key{'s' * (len(self.keys) > 1)} {', '.join(self.keys)} of a store"

    @property
    def in_line(self) -> str:
        """The line in parentheses, if it is known."""
        return f" ({self.call.line})" if self.call.site or not self.is_in_init else ""

    @property
    def name(self) -> str:
        """The call as it is named in a sentence; of a message with its peer."""
        if self.is_at_store:
            return f"{self.call.name}({', '.join(self.keys)})"
        if not self.call.is_p2p:
            return self.call.name
        direction = "to" if self.call.kind == "send" else "from"
        peer = "any rank" if self.call.peer is None else f"rank {self.group.ranks[self.call.peer]}"
        tag = f", tag {self.call.tag}" if self.call.tag else ""
        return f"{self.call.kind} #{self.call.place} {direction} {peer}{tag}"

    @property
    def title(self) -> str:
        return " ".join([self.name, *self.call.shapes])


@dataclass
class _Inbox:
    """The messages of one tag to one rank: what was sent, and what is received, by source; None: from any rank."""

    sent: dict[int, list[Call]]
    received: dict[int | None, list[Call]]


def _inboxes(records: Records) -> list[tuple[SharedGroup, int, _Inbox]]:
    """The inboxes of all ranks, with the group of their messages."""
    by_rank = whole_records(records)
    have_all = all(record.has_all_messages for record in records)
    if not have_all or not any(record.messages for record in by_rank.values()):
        return []
    all_inboxes = []
    for group in shared_groups(records):
        # The inboxes by target and tag.
        inboxes: dict[tuple[int, int], _Inbox] = defaultdict(lambda: _Inbox({}, {}))
        for rank in group.ranks:
            record = by_rank.get(rank)
            messages = () if record is None else record.messages.get(group.key, ())
            for call in messages:
                _put(inboxes, group, rank, call)
        all_inboxes += [(group, target, inbox) for (target, _), inbox in inboxes.items()]
    return all_inboxes


def _put(inboxes: Mapping[tuple[int, int], _Inbox], group: SharedGroup, rank: int, call: Call) -> None:
    """Put a send of a rank into the inbox of its target, and a receive into its own."""
    if call.peer is not None and call.peer >= len(group.ranks):
        return
    peer = None if call.peer is None else group.ranks[call.peer]
    if call.kind == "send" and peer is not None:
        inboxes[peer, call.tag].sent.setdefault(rank, []).append(call)
    else:
        inboxes[rank, call.tag].received.setdefault(peer, []).append(call)


def pairs_of(records: Records) -> list[Pair]:
    """The sends and receives that belong together. Where a rank receives from any, that is not known."""
    pairs = []
    for group, target, inbox in _inboxes(records):
        if None in inbox.received:
            continue
        for source, sent in inbox.sent.items():
            received = inbox.received.get(source, ())
            for send, receive in zip(sent, received, strict=False):
                pairs.append(Pair(group, source, target, send, receive))
    return pairs


def unpaired(records: Records) -> list[Wait]:
    """The sends and receives without a partner. Where a rank receives from any, only their numbers are compared."""
    waits: list[Wait] = []
    for group, target, inbox in _inboxes(records):
        if None in inbox.received:
            waits += _unpaired_by_number(group, target, inbox)
            continue
        sources = {*inbox.sent, *(source for source in inbox.received if source is not None)}
        for source in sources:
            sends = inbox.sent.get(source, [])
            receives = inbox.received.get(source, [])
            waits += [Wait(source, group, call, (target,)) for call in sends[len(receives) :]]
            waits += [Wait(target, group, call, (source,)) for call in receives[len(sends) :]]
    return waits


def _unpaired_by_number(group: SharedGroup, target: int, inbox: _Inbox) -> list[Wait]:
    """The latest sends, or receives, of an inbox that are more than the others."""
    sent = _in_order(inbox.sent)
    received = _in_order(inbox.received)
    others = tuple(rank for rank in group.ranks if rank != target)
    waits = []
    for source, call in sent[len(received) :]:
        waits.append(Wait(source, group, call, (target,), by_number=True))
    for peer, call in received[len(sent) :]:
        if peer is None:
            waits.append(Wait(target, group, call, others, any_of=True))
        else:
            waits.append(Wait(target, group, call, (peer,)))
    return waits


def _in_order(calls: Mapping[Peer, Sequence[Call]]) -> list[tuple[Peer, Call]]:
    """The calls of all peers, in the order of the calls."""
    pairs = [(peer, call) for peer, of_peer in calls.items() for call in of_peer]
    return sorted(pairs, key=lambda pair: pair[1].order)
