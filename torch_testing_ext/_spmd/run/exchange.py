"""Decides whether ranks tell each other, at the start of a call, of programs that have not been verified.

Ranks trace independently, but verify together. While programs are new, ranks exchange in every call. After some calls
in which no rank had a new one they do so ever more rarely, so that the exchange costs next to nothing. All ranks make
the same calls and get the same answers, and so agree on when to exchange next.
"""

from __future__ import annotations

_QUIET_CALLS = 2
_LONGEST_GAP = 256


class ExchangeSchedule:
    """Decides in which calls the ranks exchange."""

    def __init__(self) -> None:
        self.quiet, self.gap, self.waiting = 0, 0, 0

    def is_due(self) -> bool:
        """Whether this call begins with an exchange. Call it once for each call."""
        if self.waiting:
            self.waiting -= 1
            return False
        return True

    def conclude(self, quiet: bool) -> None:
        """Plan the next exchange after one in which some rank had a new program, or after a quiet one."""
        self.quiet = self.quiet + 1 if quiet else 0
        self.gap = 0 if self.quiet < _QUIET_CALLS else min(max(2 * self.gap, 1), _LONGEST_GAP)
        self.waiting = self.gap
