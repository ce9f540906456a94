"""The values that rank 0 sends to the other ranks for an example, and how each rank turns them into arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class PerRank(Generic[T]):
    """One value for each rank. The test's body gets the value of its own rank."""

    values: tuple[T, ...]

    def __repr__(self) -> str:
        return "{" + ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(self.values)) + "}"


class Blueprint:
    """A plan of something that all ranks build together, such as a mesh. The plan is drawn, sent and shown."""

    def build(self) -> Any:
        """Build the planned object in this rank."""
        raise NotImplementedError


def for_rank(value: Any, rank: int) -> Any:
    """Turn a drawn value into an argument: take the rank's share and build blueprints, also in containers."""
    if isinstance(value, PerRank):
        return for_rank(value.values[rank], rank)
    if isinstance(value, Blueprint):
        return value.build()
    if type(value) in (list, tuple):
        return type(value)(for_rank(item, rank) for item in value)
    if type(value) is dict:
        return {key: for_rank(item, rank) for key, item in value.items()}
    return value


class NoMoreDraws(RuntimeError):
    """A rank waits for a draw of rank 0, which has left the example."""


class LeadersData:
    """`st.data()` in rank 0: each value that is drawn during an example goes to the other ranks at once."""

    def __init__(self, data: Any, send: Callable[[Any], None]):
        self._data = data
        self._send = send

    def draw(self, strategy: Any, label: Any = None) -> Any:
        value = self._data.draw(strategy, label)
        self._send(value)
        return for_rank(value, 0)

    def __repr__(self) -> str:
        return repr(self._data)


class FollowersData:
    """`st.data()` in another rank: each draw returns the value that rank 0 drew."""

    def __init__(self, receive: Callable[[], Any], rank: int):
        self._receive = receive
        self._rank = rank

    def draw(self, strategy: Any, label: Any = None) -> Any:
        return for_rank(self._receive(), self._rank)

    def __repr__(self) -> str:
        return "data(...)"
