"""`@timeout`, which sets how long a test may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
ATTRIBUTE = "_torch_testing_ext_timeout"


def timeout(seconds: float) -> Callable[[T], T]:
    """Decorator: limit the time of a test, or of each test in a class. A test's own timeout overrides its class's."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"@timeout({seconds!r}): the timeout must be a number of seconds greater than 0")

    def decorate(target: T) -> T:
        setattr(target, ATTRIBUTE, float(seconds))
        return target

    return decorate


def timeout_of(test: Any) -> float | None:
    """Return the seconds that `@timeout` gives to this test case; None without it."""
    method = getattr(test, test._testMethodName, None)
    return getattr(method, ATTRIBUTE, getattr(test, ATTRIBUTE, None))
