"""The time in which a unit waits for devices that other runs have."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch_testing_ext._process.loop import Timer


@dataclass
class WaitForOthers:
    """Since when a unit waits, and when it tries again."""

    since: float = field(default_factory=time.monotonic)
    retry: Timer | None = None
    told: tuple[str, ...] | None = None  # the other runs that the user knows of

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since
