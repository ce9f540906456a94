"""How much device memory tests needed in earlier runs, from which --gpu-sharing decides what fits on a GPU together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..model import FinishedTest, Test
from .durations import REPRESENTATIVE
from .inventory import Inventory
from .remembered import Remembered, Warn

# What a test may need beyond what it has needed: allocators and libraries do not take the same each time.
MARGIN = 1.25
# The rest is for the driver, and for what the libraries of several processes take.
SHARED_PART = 0.9
# Fake devices have no memory: with --fake-gpus, each counts as one of these.
FAKE_MEMORY = 16 * 2**30


class PeakMemory:
    """The recorded needs of tests, in bytes. What a run records takes effect in the next run."""

    def __init__(self, folder: Path, warn: Warn):
        self._remembered = Remembered(folder, "memory", _is_bytes, warn)
        self._bytes: dict[str, int] = self._remembered.load()

    def expected(self, test: Test) -> int | None:
        """The bytes of each device that a test may need; None if unknown."""
        known = self._bytes.get(str(test.id))
        return None if known is None else int(known * MARGIN)

    def record(self, finished: Iterable[FinishedTest]) -> None:
        """Stores what these tests have needed for later runs."""
        needed = {
            str(one.test.id): one.last.memory.needed
            for one in finished
            if one.last.outcome in REPRESENTATIVE and one.last.memory is not None and not one.test.shared_by
        }
        if needed:
            self._remembered.update(lambda known: _blend(known, needed))


def memory_to_share(inventory: Inventory) -> dict[str, int]:
    """The bytes of each device that the units on it may use together; nothing of one of which that is unknown."""
    if inventory.fake:
        return dict.fromkeys(inventory.names, FAKE_MEMORY)
    known = zip(inventory.names, inventory.facts, strict=False)
    return {name: int(facts.memory * SHARED_PART) for name, facts in known if facts.memory}


def _is_bytes(value: Any) -> bool:
    return type(value) is int and value >= 0


def _blend(known: dict[str, Any], needed: dict[str, int]) -> None:
    """Stores a larger need at once, and follows a smaller one slowly."""
    for test, now in needed.items():
        known[test] = max(now, (known.get(test, now) + now) // 2)
