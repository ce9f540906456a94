"""Whole worlds as data for reports: what ranks without communication have issued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch_testing_ext._process.words import count, size_in_words


class WorldCall(NamedTuple):
    """A call of a class of ranks, and the bytes that each of them hands over."""

    name: str
    group: str
    bytes: int
    site: str


@dataclass(frozen=True)
class WorldClass:
    """Ranks that have issued the same: `count` calls each. `calls`: the first of these, if they were asked for."""

    ranks: tuple[int, ...]
    count: int
    calls: tuple[WorldCall, ...] = ()


@dataclass(frozen=True)
class WorldView:
    """A whole world. `traffic`: the bytes from each block of `block` neighbouring ranks (row) to each (column)."""

    size: int
    block: int
    traffic: tuple[tuple[int, ...], ...]
    classes: tuple[WorldClass, ...]
    longest_chain: int
    # The lines whose assertions compare values that were not communicated.
    not_judged: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        """Its size, what is alike, and how much was sent."""
        calls = sum(len(alike.ranks) * alike.count for alike in self.classes)
        classes = f"{len(self.classes)} {'class' if len(self.classes) == 1 else 'classes'}"
        sent = size_in_words(sum(map(sum, self.traffic)))
        words = f"whole world of {count(self.size, 'rank')} in {classes}: {count(calls, 'call')}, {sent} sent"
        return f"{words}, longest chain {self.longest_chain}"

    def block_of(self, number: int) -> range:
        """The ranks of a row or column."""
        return range(number * self.block, min(self.size, (number + 1) * self.block))


def describe_world(size: int) -> str:
    """The header of a run whose tests run in whole worlds."""
    return f"whole world: {count(size, 'rank')} for each test, without communication"


HAS_NO_RANKS = "has no ranks"


def not_in_world(size: int, why: str) -> str:
    """The reason of a skip. `why`: a verb with its object, of which the test is the subject."""
    return f"not in a world of {count(size, 'rank')}: it {why}"


class NotedWorlds:
    """The worlds of the test that runs. They are kept only in a process whose runner asks for them."""

    def __init__(self) -> None:
        self.are_wanted = False
        self._views: list[WorldView] = []

    def add(self, view: WorldView) -> None:
        self._views.append(view)

    def take(self) -> tuple[WorldView, ...]:
        """Return the worlds since the last call, and note those that follow."""
        self.are_wanted = True
        taken, self._views = self._views, []
        return tuple(taken)


noted = NotedWorlds()
