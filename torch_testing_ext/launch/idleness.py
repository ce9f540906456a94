"""The CPU time of ranks, as the kernel shows it: that costs much less than to ask them for their collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch_testing_ext._process import system

INTERVAL = 0.15
# The system counts CPU time in steps of 0.01 s. Threads that serve connections use a little all the time.
_STEP, _SHARE = 0.015, 0.02


class Idleness:
    """Tells whether processes are idle, from their CPU time at two moments."""

    def __init__(self, cpu_seconds: Callable[[int], float | None] = system.cpu_seconds) -> None:
        self._cpu_seconds = cpu_seconds
        self._at = 0.0
        self._before: dict[int, float | None] | None = None

    def forget(self) -> None:
        """Begin again."""
        self._before = None

    def idle(self, pids: Sequence[int], now: float) -> set[int] | None:
        """Return those of these processes that have not computed since the last call; None if that was too recent.

        Where the system shows no CPU time, they count as idle.
        """
        if self._before is not None and now < self._at + INTERVAL:
            return None
        before, elapsed, self._at = self._before, now - self._at, now
        self._before = found = {pid: self._cpu_seconds(pid) for pid in pids}
        if before is None:
            return None
        most = _STEP + _SHARE * elapsed
        return {pid for pid, seconds in found.items() if not _has_used_more(most, before.get(pid), seconds)}


def _has_used_more(most: float, before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return False
    return math.isinf(before) or math.isinf(after) or after - before > most
