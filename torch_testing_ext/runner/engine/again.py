"""Failures that other tests may have caused: such a test runs again, once, undisturbed, whatever --retries says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..model import Attempt, Test, TestId
from ..scheduling.leases import Leases
from ..scheduling.node_leases import NodeLeases
from ..selection.ports import is_collision, ports_in_use


class Undisturbed:
    """Which tests run again while no other test disturbs them."""

    def __init__(self, leases: Leases | NodeLeases, warn: Callable[[str], object]):
        self._leases = leases
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
        self._leases.learn_ports(attempt.test.id.file, ports)
        which = f"port {', '.join(map(str, sorted(ports)))}" if ports else "a port"
        self._warn(
            f"{attempt.test.id}: {which} was in use (EADDRINUSE); the test runs again while no other runs, and further "
            "tests of its file run one after the other"
        )
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
