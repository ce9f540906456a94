"""The values that rank 0 sends to the other ranks for an example, and their way into arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class PerRank(Generic[T]):
    """One value for each rank. The test's body gets the value of its own rank."""

    values: tuple[T, ...]

    def __repr__(self) -> str:
        parts = [f"rank {rank}: {value!r}" for rank, value in enumerate(self.values)]
        return f"{{{', '.join(parts)}}}"


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


class SharedData:
    """`st.data()` in a rank: `next_value` returns what rank 0 draws with a strategy and a label, in every rank."""

    def __init__(self, next_value: Callable[[Any, Any], Any], rank: int):
        self._next_value = next_value
        self._rank = rank

    def draw(self, strategy: Any, label: Any = None) -> Any:
        return for_rank(self._next_value(strategy, label), self._rank)

    def __repr__(self) -> str:
        return "data(...)"
