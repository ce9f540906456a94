"""`@sanitize`, which has the collectives of one test checked more closely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch_testing_ext._sanitizer.kinds import kinds_of

T = TypeVar("T")
_ATTRIBUTE = "_torch_testing_ext_sanitize"


def sanitize(*kinds: str) -> Callable[[T], T]:
    """Decorator: sanitize a test, or the tests of a class, as by `--sanitize=KINDS`.

    Without kinds, by the default ones. A test's own kinds are checked besides those of its class and of the run.
    """
    if any(not isinstance(kind, str) for kind in kinds):
        raise ValueError("@sanitize takes the names of kinds, and has to be called: @sanitize() or @sanitize('nan')")
    names = kinds or ("default",)
    try:
        kinds_of(names)
    except ValueError as error:
        raise ValueError(f"@sanitize{kinds}: {error}") from None

    def decorate(target: T) -> T:
        setattr(target, _ATTRIBUTE, names)
        return target

    return decorate


def kinds_on(*targets: Any) -> tuple[str, ...]:
    """The kinds that `@sanitize` names on these functions and classes."""
    return tuple(kind for target in targets for kind in getattr(target, _ATTRIBUTE, ()))


def kinds_of_test(test: Any) -> tuple[str, ...]:
    """The kinds that `@sanitize` names on this test case and on its class."""
    return kinds_on(getattr(test, test._testMethodName, None), type(test))
