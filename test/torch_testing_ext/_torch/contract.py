"""An assumption about torch as a test, which says what depends on it."""

import functools
from collections.abc import Callable
from typing import Any

from kit.own_process import words_of


class BrokenContract(AssertionError):
    """torch is no longer what we assume."""


def contract(affects: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: a test of the assumption in its docstring. `affects`: the part of the package that depends on it."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                raise BrokenContract(f"{test.__doc__} This affects {affects}. {words_of(error)}") from error

        return call

    return decorate
