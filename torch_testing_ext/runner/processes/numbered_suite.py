"""A suite that announces each of its tests by number before unittest runs it."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class NumberedSuite(unittest.TestSuite):
    """Tests with numbers. Neither their ids nor the objects tell them apart: a suite may have the same test twice."""

    _cleanup = False  # keep the tests, which are not in the list that the base class clears

    def __init__(self, tests: Sequence[tuple[int, Any]], announce: Callable[[int, Any], object]):
        super().__init__()
        self._numbered = tests
        self._announce = announce

    def __iter__(self) -> Iterator[Any]:
        for number, test in self._numbered:
            self._announce(number, test)
            yield test
