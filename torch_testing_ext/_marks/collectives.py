"""`@collectives_may_differ`, for tests whose ranks issue different collectives on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_ATTRIBUTE = "_torch_testing_ext_collectives_may_differ"


def collectives_may_differ(reason: str) -> Callable[[T], T]:
    """Decorator: do not fail a test, or the tests of a class, whose ranks disagree in a collective."""
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError(
            f"@collectives_may_differ({reason!r}): say why, as in @collectives_may_differ('tests the error')"
        )

    def decorate(target: T) -> T:
        setattr(target, _ATTRIBUTE, reason)
        return target

    return decorate


def may_differ(*targets: Any) -> bool:
    """Has one of these functions and classes `@collectives_may_differ`?"""
    return any(hasattr(target, _ATTRIBUTE) for target in targets)
