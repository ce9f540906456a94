"""Skips that are decided when the test runs."""

import functools
import importlib
import os
import sys
import sysconfig
import unittest
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch_testing_ext._machine import flags
from torch_testing_ext._machine.flags import flag
from torch_testing_ext._torch.devices import build_options, cuda_state

from . import needs
from .parametrized import Decorator, copy_of
from .skips import bare_or_called, lazy_skip_if, skip_by, skipIfHpu, skipIfRocm, skipIfXpu
from .skips_at_definition import marked

runOnRocm = skip_by("TEST_WITH_ROCM", "test currently only works on the ROCm stack", unless=True)


def requires_accelerator(fn: Any) -> Any:
    return needs.declare_devices(skip_by("TEST_ACCELERATOR", "requires accelerator", unless=True)(fn), 1)


def skipIfCachingAllocatorDisabled(fn: Any) -> Any:
    """Skip where CUDA's allocator does not cache: the environment or the process turned that off."""
    reason = "requires the CUDA/HIP caching allocator (current allocator is uncached)"
    return lazy_skip_if(lambda: flag("TEST_CUDA") and not cuda_state.caching_allocator_is_enabled(), reason)(fn)


skipIfNoLapack = lazy_skip_if(lambda: not build_options.has_lapack(), "PyTorch compiled without Lapack")


def skipIfNoXNNPACK(fn: Any) -> Any:
    reason = "XNNPACK must be enabled for these tests. Please build with USE_XNNPACK=1."
    return lazy_skip_if(lambda: not importlib.import_module("torch.backends.xnnpack").enabled, reason)(fn)


skipIfCrossRef = skip_by("TEST_WITH_CROSSREF", "test doesn't currently work with crossref")
skipIfNoSciPy = skip_by("TEST_SCIPY", "test requires SciPy, but SciPy was not found", unless=True)


def skipIfTorchDynamo(msg: str = "test doesn't currently work with dynamo") -> Decorator:
    if not isinstance(msg, str):
        raise ValueError("write @skipIfTorchDynamo() or @skipIfTorchDynamo('reason')")
    return skip_by("TEST_WITH_TORCHDYNAMO", msg)


def skipIfTorchInductor(
    msg: str = "test doesn't currently work with torchinductor", condition: bool | None = None
) -> Decorator:
    return lazy_skip_if(lambda: flag("TEST_WITH_TORCHINDUCTOR") if condition is None else condition, msg)


def skipRocmIfTorchInductor(msg: str = "test doesn't currently work with torchinductor on the ROCm stack") -> Decorator:
    return lazy_skip_if(lambda: flag("TEST_WITH_ROCM") and flag("TEST_WITH_TORCHINDUCTOR"), msg)


def skipIfNNModuleInlined(
    msg: str = "test doesn't currently work with nn module inlining", condition: bool = True
) -> Decorator:
    return lazy_skip_if(lambda: condition, msg)


# PyTorch keeps these for classes that have not migrated; there, a class that they decorate is never run or reported.
skipIfRocm_BUGGY = skipIfRocm
skipIfXpu_BUGGY = skipIfXpu
skipIfHpu_BUGGY = skipIfHpu


def skipIfFreeThreaded(msg: str = "Test doesn't work with free-threaded python") -> Decorator:
    return unittest.skipIf(sysconfig.get_config_var("Py_GIL_DISABLED") == 1, msg)


def skipIfPythonVersionMismatch(predicate: Callable[[int, int, int], bool]) -> Decorator:
    """Run only where `predicate(major, minor, micro)` is true."""
    return lazy_skip_if(lambda: not predicate(*sys.version_info[:3]), "Python version mismatch")


skip_if_pytest = lazy_skip_if(lambda: "PYTEST_CURRENT_TEST" in os.environ, "does not work under pytest")


def slowTest(fn: Any) -> Any:
    """Run the test only with PYTORCH_TEST_WITH_SLOW=1."""
    reason = "test is slow; run with PYTORCH_TEST_WITH_SLOW to enable test"
    skip = skip_by("TEST_WITH_SLOW", reason, unless=True)
    wrapper = skip(fn)
    wrapper.slow_test = True
    return wrapper


def slowTestIf(condition: bool) -> Decorator:
    return slowTest if condition else lambda fn: fn


def check_slow_or_fast(test: unittest.TestCase) -> None:
    """Skip a fast test with PYTORCH_TEST_SKIP_FAST=1."""
    method = getattr(test, test._testMethodName)
    if flag("TEST_SKIP_FAST") and not getattr(method, "slow_test", False):
        raise unittest.SkipTest("test is fast; we disabled it with PYTORCH_TEST_SKIP_FAST")


def skip_but_pass_in_sandcastle(reason: str) -> Decorator:
    """`unittest.skip`, except in Meta's sandcastle, where the test passes without running."""
    return skip_but_pass_in_sandcastle_if(True, reason)


def skip_but_pass_in_sandcastle_if(condition: Any, reason: str) -> Decorator:
    """`unittest.skipIf`, except in Meta's sandcastle, where the test passes without running."""

    def decorate(func: Any) -> Any:
        if not condition:
            return func
        if not flag("IS_SANDCASTLE"):
            func.__unittest_skip__ = True
            func.__unittest_skip_why__ = reason
            return func

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            print(f"Skipping {func.__name__} on sandcastle for following reason: {reason}", file=sys.stderr)

        return wrapper

    return decorate


def xfailIf(condition: Any) -> Decorator:
    return lambda func: unittest.expectedFailure(func) if condition else func


def xfail_where(condition: Callable[[], Any]) -> Decorator:
    """`xfailIf` with a condition that is computed when a test is decorated."""
    return lambda func: xfailIf(condition())(func)


xfailIfLinux = xfail_where(lambda: flags.IS_LINUX and not flags.TEST_WITH_ROCM and not flags.IS_FBCODE)
xfailIfTorchDynamo = xfail_where(lambda: flags.TEST_WITH_TORCHDYNAMO)
xfailIfROCm = xfail_where(lambda: flags.TEST_WITH_ROCM)
xfailIfWindows = xfail_where(lambda: flags.IS_WINDOWS)
xfailIfPy312Plus = xfailIf(sys.version_info >= (3, 12))
xfailIfPy314Plus = xfailIf(sys.version_info >= (3, 14))
xfailIfPy313AndEarlier = xfailIf(sys.version_info < (3, 14))
xfailIfACL = xfail_where(lambda: flags.TEST_ACL)
xfailIfS390X = xfail_where(lambda: flags.IS_S390X)


def xfail_inherited_tests(tests: Iterable[str]) -> Decorator:
    """Expect the named tests, inherited by the decorated class, to fail in it alone."""

    def decorate(cls: Any) -> Any:
        for name in tests:
            setattr(cls, name, unittest.expectedFailure(copy_of(getattr(cls, name))))
        return cls

    return decorate


def suppress_warnings(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(*args, **kwargs)

    return wrapper


def serialTest(condition: bool = True) -> Decorator:
    """Mark a test that must not run beside others (the mark is pytest's `serial`)."""
    if type(condition) is not bool:
        raise ValueError("serialTest is used as @serialTest() or @serialTest(condition)")

    def decorate(fn: Any) -> Any:
        return marked("serial", fn) if condition else fn

    return decorate


def markDynamoStrictTest(cls_or_func: Any = None, nopython: bool = False) -> Any:
    """Mark a test or class for runs under torch.compile, in which errors of the compiler count."""
    return bare_or_called(cls_or_func, _with_attributes(dynamo_strict=True, dynamo_strict_nopython=nopython))


def unMarkDynamoStrictTest(cls: Any = None) -> Any:
    return bare_or_called(cls, _with_attributes(dynamo_strict=False))


def _with_attributes(**values: object) -> Decorator:
    def decorate(target: Any) -> Any:
        for name, value in values.items():
            setattr(target, name, value)
        return target

    return decorate
