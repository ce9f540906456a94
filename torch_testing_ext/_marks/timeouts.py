"""How long a test may take, where it says so itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
ATTRIBUTE = "_torch_testing_ext_timeout"


def timeout(seconds: float) -> Callable[[T], T]:
    """Decorator for a test or a test class: how long it, or each of its tests, may take. A test's own goes first."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"@timeout({seconds!r}): give the seconds that a test may take, more than 0")

    def decorate(target: T) -> T:
        setattr(target, ATTRIBUTE, float(seconds))
        return target

    return decorate


def timeout_of(test: Any) -> float | None:
    """Seconds this test case may take by its own word; None where it says nothing."""
    method = getattr(test, test._testMethodName, None)
    return getattr(method, ATTRIBUTE, getattr(test, ATTRIBUTE, None))
