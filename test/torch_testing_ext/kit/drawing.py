"""Random cases for tests of pure code: those of fixed seeds in every run, and any others in a search.

Hypothesis draws other cases in another version; a seed gives the same ones everywhere, since `Random.random` is the
method whose numbers Python promises to keep.
"""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
SEARCHED = 40  # as many cases as in other runs


def seeds(count: int) -> Iterable[int]:
    """The seeds of this run. HYPOTHESIS_PROFILE=search asks for others, and more of them."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "search":
        return range(count)
    return (random.getrandbits(32) for _ in range(SEARCHED * count))


class Drawer:
    """Draws values from a seed."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def whole(self, least: int, most: int) -> int:
        return least + int(self._random.random() * (most - least + 1))

    def number(self, least: float, most: float) -> float:
        return least + self._random.random() * (most - least)

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.whole(0, len(values) - 1)]

    def several(self, draw: Callable[["Drawer"], T], least: int, most: int) -> list[T]:
        return [draw(self) for _ in range(self.whole(least, most))]

    def shuffled(self, values: Sequence[Any]) -> list[Any]:
        keyed = sorted((self._random.random(), number) for number in range(len(values)))
        return [values[number] for _, number in keyed]
