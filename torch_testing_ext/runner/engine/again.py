"""Failures that other tests may have caused: such a test runs again, once, undisturbed, whatever --retries says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ..model import Attempt, Test, TestId

_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_HOST = r"(?:tcp://[^/:\s]*|localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\])"
_PORT = re.compile(r"\bport[:=]? ?(\d{2,5})\b|" + _HOST + r":(\d{2,5})\b|\('[^']*', (\d{2,5})\)", re.IGNORECASE)


class Undisturbed:
    """Decides which tests run again while no other test runs."""

    def __init__(self, warn: Callable[[str], object]):
        self._warn = warn
        self._collided: set[tuple[TestId, int]] = set()  # tests that found a port in use
        self._squeezed: set[tuple[TestId, int]] = set()  # tests that were ended because their node was short of memory

    def must_be_alone(self, tests: Iterable[Test], repetition: int) -> bool:
        return any((test.id, repetition) in self._collided | self._squeezed for test in tests)

    def wants_again(self, attempt: Attempt) -> bool:
        """Whether another test may have caused this failure, for the first time."""
        return self._is_first_collision(attempt) or self._is_first_end_for_others(attempt)

    def _is_first_collision(self, attempt: Attempt) -> bool:
        key = attempt.test.id, attempt.repetition
        if key in self._collided or not is_collision(attempt):
            return False
        self._collided.add(key)
        ports = ports_in_use(attempt)
        which = f"port {', '.join(map(str, sorted(ports)))}" if ports else "a port"
        self._warn(f"{attempt.test.id}: {which} was in use (EADDRINUSE); the test runs again while no other runs")
        return True

    def _is_first_end_for_others(self, attempt: Attempt) -> bool:
        key = attempt.test.id, attempt.repetition
        if not attempt.crowded or key in self._squeezed:
            return False
        self._squeezed.add(key)
        self._warn(
            f"{attempt.test.id}: it was ended because node {attempt.lease.node} was short of memory, which other tests "
            "used, too; it runs again while no other runs"
        )
        return True


def is_collision(attempt: Attempt) -> bool:
    """Did this attempt fail because a port was in use?"""
    return any(_IN_USE.search(text) for text in _texts(attempt))


def ports_in_use(attempt: Attempt) -> frozenset[int]:
    """The ports that were in use, as far as the failure names them."""
    lines = (line for text in _texts(attempt) for line in text.splitlines() if _IN_USE.search(line))
    return frozenset(int(next(filter(None, found))) for line in lines for found in _PORT.findall(line))


def _texts(attempt: Attempt) -> tuple[str, ...]:
    return (attempt.message, attempt.output, *(log.output for log in attempt.ranks))
