"""Sends and receives: which belong together, and which have no partner yet. Only a log of all calls knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .records import Call, RankRecord, SharedGroup, shared_groups, whole


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
    any_of: bool = False  # one of the missing is enough: a receive from any rank

    @property
    def name(self) -> str:
        """The call as it is named in a sentence; of a message with its peer."""
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


def _inboxes(records: Sequence[RankRecord]) -> list[tuple[SharedGroup, int, _Inbox]]:
    by_rank = whole(records)
    if not any(record.messages for record in by_rank.values()):
        return []
    found = []
    for group in shared_groups(records):
        inboxes: dict[tuple[int, int], _Inbox] = {}
        for rank in group.ranks:
            for call in by_rank[rank].messages.get(group.key, ()) if rank in by_rank else ():
                if call.peer is not None and call.peer >= len(group.ranks):
                    continue
                peer = None if call.peer is None else group.ranks[call.peer]
                if call.kind == "send" and peer is not None:
                    inbox = inboxes.setdefault((peer, call.tag), _Inbox({}, {}))
                    inbox.sent.setdefault(rank, []).append(call)
                else:
                    inbox = inboxes.setdefault((rank, call.tag), _Inbox({}, {}))
                    inbox.received.setdefault(peer, []).append(call)
        found += [(group, target, inbox) for (target, _), inbox in inboxes.items()]
    return found


def pairs_of(records: Sequence[RankRecord]) -> list[Pair]:
    """The sends and receives that belong together. Where a rank receives from any, that is not known."""
    found = []
    for group, target, inbox in _inboxes(records):
        if None not in inbox.received:
            for source, sent in inbox.sent.items():
                pairs = zip(sent, inbox.received.get(source, ()), strict=False)
                found += [Pair(group, source, target, send, receive) for send, receive in pairs]
    return found


def unpaired(records: Sequence[RankRecord]) -> list[Wait]:
    """The sends and receives without a partner. Where a rank receives from any, only their numbers are compared."""
    found = []
    for group, target, inbox in _inboxes(records):
        others = tuple(rank for rank in group.ranks if rank != target)
        if None in inbox.received:
            sent = [(source, call) for source, calls in inbox.sent.items() for call in calls]
            received = [(source, call) for source, calls in inbox.received.items() for call in calls]
            # The latest are those without a partner, as far as can be known.
            for source, call in sorted(sent, key=lambda one: one[1].order)[len(received) :]:
                found.append(Wait(source, group, call, (target,)))
            for peer, call in sorted(received, key=lambda one: one[1].order)[len(sent) :]:
                found.append(Wait(target, group, call, others if peer is None else (peer,), any_of=peer is None))
            continue
        for source in {*inbox.sent, *(source for source in inbox.received if source is not None)}:
            sends, receives = inbox.sent.get(source, []), inbox.received.get(source, [])
            found += [Wait(source, group, call, (target,)) for call in sends[len(receives) :]]
            found += [Wait(target, group, call, (source,)) for call in receives[len(sends) :]]
    return found
