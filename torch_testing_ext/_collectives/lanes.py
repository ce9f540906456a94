"""Lanes: when each rank of a test ran and what it issued then, for pictures of the test. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .records import RankRecord

# The latest calls of all ranks together that are kept.
MOST_CALLS = 2_000
_LEAST_OF_A_RANK = 4
FILE = "ranks.lanes"


class TimedCall(NamedTuple):
    """A collective. `group` and `place` are the same for all of its members. The recorder does not time its end."""

    name: str
    group: str
    place: int
    at: float  # seconds since 1970
    is_over: bool
    site: str


@dataclass(frozen=True)
class RankLane:
    """The life of a rank in seconds since 1970: the test asked for it, it began, it ended."""

    rank: int
    asked: float
    began: float
    ended: float
    how: str  # it ended, in a word
    calls: tuple[TimedCall, ...] = ()


class CallBar(NamedTuple):
    """A call in a picture. `until`: the next call of its rank, or the end of that."""

    rank: int
    call: TimedCall
    over: float
    until: float


def calls_of(record: RankRecord | None, ranks: int) -> tuple[TimedCall, ...]:
    """The latest calls of one of so many ranks."""
    if record is None:
        return ()
    found = [
        TimedCall(
            str(call), f"{group.title}, {key.generation}", call.place, call.at, call.is_over, str(call.site or "")
        )
        for key, calls in record.calls.items()
        for group in (record.groups[key],)
        for call in calls
        if call.at
    ]
    found.sort(key=lambda call: call.at)
    if found and any(calls[-1].at == found[-1].at and calls[-1].raised for calls in record.calls.values()):
        found[-1] = found[-1]._replace(is_over=False)
    return tuple(found[-max(_LEAST_OF_A_RANK, MOST_CALLS // ranks) :])


def meetings(lanes: Iterable[RankLane]) -> list[list[tuple[int, TimedCall]]]:
    """The calls that belong together, each with its rank, the first to come first."""
    found: dict[tuple[str, int], dict[int, TimedCall]] = {}
    for lane in lanes:
        for call in lane.calls:
            found.setdefault((call.group, call.place), {})[lane.rank] = call
    met = [calls for calls in map(_same_kind, found.values()) if len(calls) > 1]
    return [sorted(calls.items(), key=lambda one: one[1].at) for calls in met]


def bars(lanes: Iterable[RankLane], met: Iterable[Sequence[tuple[int, TimedCall]]]) -> list[CallBar]:
    """The calls of all ranks. One that is over was so when the last rank came, as far as the recorder tells."""
    arrived = {(calls[-1][1].group, calls[-1][1].place): calls[-1][1].at for calls in met}
    found = []
    for lane in lanes:
        ends = [*(call.at for call in lane.calls[1:]), lane.ended]
        for call, until in zip(lane.calls, ends, strict=False):
            over = arrived.get((call.group, call.place), call.at) if call.is_over else until
            found.append(CallBar(lane.rank, call, min(over, until), until))
    return found


def _same_kind(calls: Mapping[int, TimedCall]) -> dict[int, TimedCall]:
    """Ranks that disagree do not meet: only those of the most frequent kind do."""
    kinds = [call.name for call in calls.values()]
    most = max(kinds, key=kinds.count)
    return {rank: call for rank, call in calls.items() if call.name == most}
