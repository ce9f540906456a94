"""Whether ranks compute, as the kernel shows it: that costs much less than to ask them for their collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_testing_ext._process import system

from .report import now

INTERVAL = 0.15
# The system counts CPU time in steps of 0.01 s. Threads that serve connections use a little all the time.
_STEP, _SHARE = 0.015, 0.02


class Idleness:
    """Tells from two looks at the CPU time of processes whether these are idle."""

    def __init__(self) -> None:
        self._at = 0.0
        self._before: dict[int, float | None] | None = None

    def forget(self) -> None:
        """Begin again: what was seen is of another time."""
        self._before = None

    def idle(self, pids: Sequence[int]) -> set[int] | None:
        """Finds the processes that have not computed since the last call; None if there was none long enough ago.

        Where the system shows no CPU time, they count as idle.
        """
        if self._before is not None and now() < self._at + INTERVAL:
            return None
        before, elapsed, self._at = self._before, now() - self._at, now()
        self._before = found = {pid: system.cpu_seconds(pid) for pid in pids}
        if before is None:
            return None
        most = _STEP + _SHARE * elapsed
        return {pid for pid, seconds in found.items() if not _has_used_more(most, before.get(pid), seconds)}


def _has_used_more(most: float, before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return False
    return math.isinf(before) or math.isinf(after) or after - before > most
