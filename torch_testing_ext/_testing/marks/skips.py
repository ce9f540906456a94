"""Skips and expected failures by flags."""

import functools
import unittest
from collections.abc import Callable
from typing import Any

from torch_testing_ext._machine.flags import flag

from . import needs
from .parametrized import Decorator as Decorator


def skip_for(why: Callable[..., str | None]) -> Decorator:
    """Skip the decorated test where `why`, called with its arguments before each run, returns a reason."""

    def decorate(target: Any) -> Any:
        if isinstance(target, type):
            return needs.each_test(target, decorate)

        @functools.wraps(target)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            reason = why(*args, **kwargs)
            if reason is not None:
                raise unittest.SkipTest(reason)
            return target(*args, **kwargs)

        return wrapper

    return decorate


def lazy_skip_if(condition_fn: Callable[[], Any], reason: str) -> Decorator:
    """Skip the decorated test or class where `condition_fn()` is true; it is called before each run of a test."""

    def decorate(target: Any) -> Any:
        if isinstance(target, type):
            return unittest.skip(reason)(target) if condition_fn() else target
        return skip_for(lambda *args, **kwargs: reason if condition_fn() else None)(target)

    return decorate


def bare_or_called(func: Any, decorator: Decorator) -> Any:
    """Support both `@skip` and `@skip(msg=...)`."""
    return decorator if func is None else decorator(func)


def skip_by(name: str, reason: str, *, unless: bool = False) -> Decorator:
    return lazy_skip_if(lambda: bool(flag(name)) != unless, reason)


def skipIfRocm(func: Any = None, *, msg: str = "test doesn't currently work on the ROCm stack") -> Any:
    return bare_or_called(func, skip_by("TEST_WITH_ROCM", f"skipIfRocm: {msg}"))


def skipIfXpu(func: Any = None, *, msg: str = "test doesn't currently work on the XPU stack") -> Any:
    return bare_or_called(func, skip_by("TEST_XPU", f"skipIfXpu: {msg}"))


def skipIfWindows(func: Any = None, *, msg: str = "test doesn't currently work on the Windows stack") -> Any:
    return bare_or_called(func, skip_by("IS_WINDOWS", f"skipIfWindows: {msg}"))


skipIfHpu = skip_by("TEST_HPU", "test doesn't currently work with HPU")
skipIfMPS = skip_by("TEST_MPS", "test doesn't currently work with MPS")
skipIfNoXPU = skip_by("TEST_XPU", "test needs PyTorch with XPU", unless=True)
