"""An event loop that waits for nothing: its clock jumps to the next timer when no descriptor is readable."""

from __future__ import annotations

import math
import selectors
import unittest

from torch_testing_ext._process.event_loop import EventLoop


class JumpingLoop(EventLoop):
    """Deadlines and grace periods pass at once. Without a timer, it waits for descriptors as any loop does."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(lambda: self.now)

    @classmethod
    def of(cls, case: unittest.TestCase) -> JumpingLoop:
        """A loop that is closed when the test is over."""
        loop = cls()
        case.addCleanup(loop.close)
        return loop

    def wait(self, seconds: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().wait(None if seconds is None else 0.0)
        if not ready and seconds is not None:
            # Never short of the moment, by rounding.
            self.now = math.nextafter(self.now + seconds, math.inf)
        return ready

    def run_for(self, seconds: float) -> None:
        """Call everything that is due in this time."""
        until = self.now + seconds
        while self.now < until:
            self.step(until)
