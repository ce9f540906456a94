"""The suites that unittest loads from a module, taken apart into tests."""

from __future__ import annotations

import unittest
import unittest.util
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def load_tests(module: ModuleType) -> Any:
    """The suite that unittest runs."""
    loader = unittest.TestLoader()
    suite: Any = loader.loadTestsFromModule(module)
    if loader.errors:
        failed: list[Any] = [test for test in suite if type(test).__name__ == "_FailedTest"]
        if failed and failed[0]._testMethodName == module.__name__:
            # Its load_tests raised.
            raise failed[0]._exception
    return suite


def flatten(suite: Any) -> Iterator[Any]:
    """The tests of a suite, and the suites that run their tests in a way of their own."""
    is_iterable = hasattr(suite, "__iter__") and not isinstance(suite, (str, bytes))
    if _is_whole(suite):
        yield suite
    elif is_iterable:
        for part in suite:
            yield from flatten(part)
    else:
        raise TypeError(f"load_tests returned, or put into a suite, {suite!r}, which is neither a test nor a suite")


def _is_whole(suite: Any) -> bool:
    if isinstance(suite, unittest.BaseTestSuite):
        return not _runs_as_usual(suite)
    if isinstance(suite, unittest.TestCase):
        return True
    return callable(suite) and not hasattr(suite, "__iter__")


def _runs_as_usual(suite: unittest.BaseTestSuite) -> bool:
    for name in ("run", "__call__"):
        usual = (getattr(unittest.TestSuite, name), getattr(unittest.BaseTestSuite, name))
        if getattr(type(suite), name) not in usual:
            return False
    return True
