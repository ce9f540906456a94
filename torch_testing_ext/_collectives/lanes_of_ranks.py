"""Lanes: when each rank of a test ran and what it issued then, for pictures of the test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LANES_FILE = "ranks.lanes"


class TimedCall(NamedTuple):
    """A collective. `group` and `place` are the same for all of its members. The recorder does not time its end."""

    name: str
    group: str
    place: int
    # Seconds since 1970.
    at: float
    is_over: bool
    site: str
    # The ranks of the group.
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankLane:
    """The life of a rank in seconds since 1970: the test asked for it, it began, it ended."""

    rank: int
    asked: float
    began: float
    ended: float
    # It ended, in a word.
    how: str
    calls: tuple[TimedCall, ...] = ()


class CallBar(NamedTuple):
    """A call in a picture. `until`: the next call of its rank, or the end of that."""

    rank: int
    call: TimedCall
    over: float
    until: float


class TimedMeeting(NamedTuple):
    """The calls that belong together, each with its rank, the first to come first; and who is still to come."""

    calls: list[tuple[int, TimedCall]]
    missing: tuple[int, ...]

    @property
    def last(self) -> tuple[int, float | None]:
        """The rank for which the first one waits, and when it came; a rank that never came has no time."""
        if self.missing:
            return self.missing[0], None
        rank, call = self.calls[-1]
        return rank, call.at


def meetings(lanes: Sequence[RankLane]) -> list[TimedMeeting]:
    """The collectives for which a rank of these lanes waits for another."""
    by_place: dict[tuple[str, int], dict[int, TimedCall]] = {}
    for lane in lanes:
        for call in lane.calls:
            by_place.setdefault((call.group, call.place), {})[lane.rank] = call
    ranks = {lane.rank for lane in lanes}
    met = [_meeting(_same_kind(calls), ranks) for calls in by_place.values()]
    return [meeting for meeting in met if len(meeting.calls) > 1 or meeting.missing]


def _meeting(calls: Mapping[int, TimedCall], ranks: set[int]) -> TimedMeeting:
    in_order = sorted(calls.items(), key=lambda pair: pair[1].at)
    waits = not any(call.is_over for call in calls.values())
    members = [rank for call in calls.values() for rank in call.members]
    missing = ranks.intersection(members).difference(calls) if waits else set()
    return TimedMeeting(in_order, tuple(sorted(missing)))


def bars(lanes: Iterable[RankLane], met: Iterable[TimedMeeting]) -> list[CallBar]:
    """The calls of all ranks. One that is over was so when the last rank came, as far as the recorder tells."""
    arrived: dict[tuple[str, int], float] = {}
    for meeting in met:
        _, last = meeting.calls[-1]
        arrived[last.group, last.place] = last.at
    drawn = []
    for lane in lanes:
        ends = [*(call.at for call in lane.calls[1:]), lane.ended]
        for call, until in zip(lane.calls, ends, strict=False):
            over = until
            if call.is_over:
                over = min(until, arrived.get((call.group, call.place), call.at))
            drawn.append(CallBar(lane.rank, call, over, until))
    return drawn


def _same_kind(calls: Mapping[int, TimedCall]) -> dict[int, TimedCall]:
    """Ranks that disagree do not meet: only those of the most frequent kind do."""
    kinds = [call.name for call in calls.values()]
    most = max(kinds, key=kinds.count)
    return {rank: call for rank, call in calls.items() if call.name == most}
