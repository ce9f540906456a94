"""Skips and expected failures by flags, hardware and platform."""

import functools
import gc
import importlib
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_testing_ext._machine import accelerators, cuda, flags
from torch_testing_ext._machine.flags import LazyVal, flag
from torch_testing_ext._torch import fsdp_parts
from torch_testing_ext._torch.devices import build_options, cuda_state

from . import needs
from .parametrized import Decorator as Decorator, copy_of

# --------------------------------------------------------------------------------------------------------------------
# Decorators that skip a test, or expect it to fail, depending on a flag.
#
# The skips read the flag when the test runs, so importing a test file computes no flag. Only a decorated class needs
# the flag at once: unittest checks for a skip before it creates an instance.


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


def _skip_by(name: str, reason: str, *, unless: bool = False) -> Decorator:
    return lazy_skip_if(lambda: bool(flag(name)) != unless, reason)


def skipIfRocm(func: Any = None, *, msg: str = "test doesn't currently work on the ROCm stack") -> Any:
    return bare_or_called(func, _skip_by("TEST_WITH_ROCM", f"skipIfRocm: {msg}"))


def skipIfXpu(func: Any = None, *, msg: str = "test doesn't currently work on the XPU stack") -> Any:
    return bare_or_called(func, _skip_by("TEST_XPU", f"skipIfXpu: {msg}"))


def skipIfWindows(func: Any = None, *, msg: str = "test doesn't currently work on the Windows stack") -> Any:
    return bare_or_called(func, _skip_by("IS_WINDOWS", f"skipIfWindows: {msg}"))


skipIfHpu = _skip_by("TEST_HPU", "test doesn't currently work with HPU")
skipIfMPS = _skip_by("TEST_MPS", "test doesn't currently work with MPS")
skipIfNoXPU = _skip_by("TEST_XPU", "test needs PyTorch with XPU", unless=True)


# -- decided when the test is defined, as in PyTorch: then neither the test nor its setUp runs


def _skip_unless(condition: Callable[[], Any], reason: str, devices: int = 0) -> Decorator:
    """Skip where the condition does not hold; a runner leases so many devices for the test."""

    def decorate(target: Any) -> Any:
        decorated = unittest.skipUnless(condition(), reason)(target)
        return needs.declare_devices(decorated, devices) if devices else decorated

    return decorate


requires_cuda = _skip_unless(lambda: flag("TEST_CUDA"), "Requires CUDA", 1)
requires_xpu = _skip_unless(lambda: flag("TEST_XPU"), "Requires XPU", 1)


def requires_multigpu(fn: Any) -> Any:
    """Skip with fewer than two CUDA devices, and mark the test with pytest's `multigpu`."""
    return _skip_unless(lambda: flag("TEST_MULTIGPU"), "requires >= 2 GPUs", 2)(_with_pytest_mark("multigpu", fn))


def periodic(fn: Any) -> Any:
    """Skip in CI, unless PYTORCH_TEST_WITH_PERIODIC=1, and mark the test with pytest's `periodic`."""
    skip = (flag("IS_CI") or flag("IS_SANDCASTLE")) and not flag("TEST_WITH_PERIODIC")
    reason = "test is periodic; run with PYTORCH_TEST_WITH_PERIODIC to enable test"
    return unittest.skipIf(skip, reason)(_with_pytest_mark("periodic", fn))


requires_mkl = _skip_unless(lambda: flag("TEST_MKL"), "Test requires MKL")
requires_onednn = _skip_unless(lambda: flag("TEST_ONEDNN"), "Test requires OneDNN/MKLDNN")
requires_cuda_python_bindings = _skip_unless(
    lambda: flag("TEST_CUDA_PYTHON_BINDINGS"), "requires cuda-python (cuda.bindings)"
)
skipIfNoDill = _skip_unless(lambda: flag("TEST_DILL"), "no dill")
skipIfSlowGradcheckEnv = _skip_unless(
    lambda: not flag("TEST_WITH_SLOW_GRADCHECK"),
    "Tests that don't use gradcheck don't need to run on slow_gradcheck CI",
)


def skipIfNotRegistered(op_name: str, message: str) -> Decorator:
    """Always skip: the operators are those of Caffe2, which is no longer a part of PyTorch."""
    return unittest.skip("Pytorch is compiled without Caffe2")


def _torch_supports_numpy() -> bool:
    if not flag("TEST_NUMPY"):
        return False
    try:
        torch.zeros(1).numpy()
    except RuntimeError:
        return False
    return True


skipIfCompiledWithoutNumpy = _skip_unless(_torch_supports_numpy, "PyTorch was compiled without numpy support")


def _with_pytest_mark(name: str, target: Any) -> Any:
    """Mark a class, or a copy of a test function: tests with other parameters may share the function."""
    return _marked(name, target if isinstance(target, type) else copy_of(target))


def _marked(name: str, target: Any) -> Any:
    try:
        import pytest
    except ImportError:
        return target
    return getattr(pytest.mark, name)(target)


# -- decided when the test runs


runOnRocm = _skip_by("TEST_WITH_ROCM", "test currently only works on the ROCm stack", unless=True)


def requires_accelerator(fn: Any) -> Any:
    return needs.declare_devices(_skip_by("TEST_ACCELERATOR", "requires accelerator", unless=True)(fn), 1)


def skipIfCachingAllocatorDisabled(fn: Any) -> Any:
    """Skip where CUDA's allocator does not cache: the environment or the process turned that off."""
    reason = "requires the CUDA/HIP caching allocator (current allocator is uncached)"
    return lazy_skip_if(lambda: flag("TEST_CUDA") and not cuda_state.caching_allocator_is_enabled(), reason)(fn)


skipIfNoLapack = lazy_skip_if(lambda: not build_options.has_lapack(), "PyTorch compiled without Lapack")


def skipIfNoXNNPACK(fn: Any) -> Any:
    reason = "XNNPACK must be enabled for these tests. Please build with USE_XNNPACK=1."
    return lazy_skip_if(lambda: not importlib.import_module("torch.backends.xnnpack").enabled, reason)(fn)


skipIfCrossRef = _skip_by("TEST_WITH_CROSSREF", "test doesn't currently work with crossref")
skipIfNoSciPy = _skip_by("TEST_SCIPY", "test requires SciPy, but SciPy was not found", unless=True)


def skipIfTorchDynamo(msg: str = "test doesn't currently work with dynamo") -> Decorator:
    if not isinstance(msg, str):
        raise ValueError("write @skipIfTorchDynamo() or @skipIfTorchDynamo('reason')")
    return _skip_by("TEST_WITH_TORCHDYNAMO", msg)


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
    skip = _skip_by("TEST_WITH_SLOW", reason, unless=True)
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
        return _marked("serial", fn) if condition else fn

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


# --------------------------------------------------------------------------------------------------------------------
# Decorators and helpers for particular devices: architecture, peer access, keeping a stream busy.

MI350_ARCH = ("gfx950",)
MI300_ARCH = ("gfx942",)
MI200_ARCH = ("gfx90a",)
NAVI3_ARCH = ("gfx1100", "gfx1101")
NAVI3_5_ARCH = ("gfx1150", "gfx1151")
NAVI4_ARCH = ("gfx1200", "gfx1201")
NAVI_ARCH = ("gfx1030", *NAVI3_ARCH, *NAVI3_5_ARCH, *NAVI4_ARCH)

CYCLES = 1_000_000


def getRocmArchName(device_index: int = 0) -> str:
    return str(accelerators.cuda_properties()["archs"][device_index])


def isRocmArchAnyOf(arch: Sequence[str]) -> bool:
    if torch.version.hip is None:
        return False
    own = getRocmArchName()
    return any(name in own for name in arch)


def is_navi3_arch() -> bool:
    if torch.version.hip is None or not flag("TEST_CUDA"):
        return False
    arch, _, _ = getRocmArchName().partition(":")
    return arch in NAVI3_ARCH


def skipIfRocmArch(arch: Sequence[str]) -> Decorator:
    def is_affected() -> bool:
        return flag("TEST_WITH_ROCM") and isRocmArchAnyOf(arch)

    return lazy_skip_if(is_affected, f"test skipped on {arch}")


def runOnRocmArch(arch: Sequence[str]) -> Decorator:
    def is_affected() -> bool:
        return flag("TEST_WITH_ROCM") and not isRocmArchAnyOf(arch)

    return lazy_skip_if(is_affected, f"test only runs on {arch}")


getRocmVersion = cuda.rocm_version


def skipIfRocmVersionLessThan(version: Sequence[int] | None = None) -> Decorator:
    def is_older() -> bool:
        return flag("TEST_WITH_ROCM") and (version is None or getRocmVersion() < tuple(version))

    return lazy_skip_if(is_older, f"ROCm version {version} or later required")


def skipIfRocmVersionAtLeast(version: Sequence[int] | None = None) -> Decorator:
    def is_affected() -> bool:
        return flag("TEST_WITH_ROCM") and version is not None and getRocmVersion() >= tuple(version)

    return lazy_skip_if(is_affected, f"ROCm version at least {version}: known failure")


def skipIfRocmVersionInRange(first_bad: Sequence[int], first_good: Sequence[int], reason: str) -> Decorator:
    def is_affected() -> bool:
        return flag("TEST_WITH_ROCM") and tuple(first_bad) <= getRocmVersion() < tuple(first_good)

    since = ".".join(map(str, first_bad))
    until = ".".join(map(str, first_good))
    return lazy_skip_if(is_affected, f"{reason} (ROCm >= {since}, < {until})")


def requires_cuda_p2p_access() -> Decorator:
    """Skip unless every CUDA device can read the memory of every other, which requires compute capability 8.0."""
    lacks_access = not accelerators.peers_have_access()
    return skip_but_pass_in_sandcastle_if(lacks_access, "cuda p2p access is not available")


def skipIfWindowsXPU(func: Any = None, *, msg: str = "test doesn't currently work on the Windows stack") -> Any:
    def is_affected() -> bool:
        return bool(flag("IS_WINDOWS") and flag("TEST_XPU"))

    on_windows = lazy_skip_if(is_affected, f"skipIfWindowsXPU: {msg}")
    return bare_or_called(func, on_windows)


# -- expected failures by CUDA's architecture, decided when the test is defined


def _xfail_on_cuda_if(condition: Callable[[], Any]) -> Decorator:
    return xfail_where(lambda: torch.version.hip is None and bool(condition()))


xfailIfSM89 = _xfail_on_cuda_if(lambda: cuda.IS_SM89)
xfailIfSM89PreCUDA13 = _xfail_on_cuda_if(lambda: cuda.IS_SM89 and cuda.cuda_version() < (13, 0))
xfailIfSM90 = _xfail_on_cuda_if(lambda: cuda.IS_SM90)
xfailIfSM100OrLater = _xfail_on_cuda_if(lambda: cuda.SM100OrLater)
xfailIfSM120OrLater = _xfail_on_cuda_if(lambda: cuda.SM120OrLater)
xfailIfSM12X = _xfail_on_cuda_if(lambda: cuda.IS_SM12X)
xfailCUDAIfSM89OrLaterOnWindows = xfail_where(lambda: flag("IS_WINDOWS") and bool(cuda.SM89OrLater))
xfailIfDistributedNotSupported = xfail_where(lambda: flag("IS_MACOS") or bool(cuda.IS_JETSON))

TRITON_PTXAS_VERSION = (12, 8)


def requires_triton_ptxas_compat(fn: Any) -> Any:
    """Skip with a CUDA that is older than the assembler that comes with Triton."""
    on_cuda = torch.version.xpu is None and torch.version.hip is None
    is_too_old = on_cuda and cuda.cuda_version() < TRITON_PTXAS_VERSION
    skip = unittest.skipIf(is_too_old, "Requires CUDA 12.8 to match Tritons ptxas version")
    return skip(fn)


def xfailIfNoAcceleratorTriton(test_func: Any) -> Any:
    """Skip the test, or all tests of the class, without Triton, unless it runs on the CPU.

    PyTorch's reports an expected failure, which only pytest understands; there, too, the test is not called.
    """
    if isinstance(test_func, type):
        for name, test in list(vars(test_func).items()):
            if name.startswith("test") and callable(test):
                setattr(test_func, name, xfailIfNoAcceleratorTriton(test))
        return test_func

    @functools.wraps(test_func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if fsdp_parts.has_triton():
            return test_func(*args, **kwargs)
        device = _device_of_call(args, kwargs)
        kind, _, _ = str(device).partition(":")
        if kind != "cpu":
            raise unittest.SkipTest(f"Triton not available (device={device!r})")
        try:
            return test_func(*args, **kwargs)
        except ImportError as error:
            if "triton" not in str(error).lower():
                raise
            raise unittest.SkipTest(f"Triton not available (device={device!r}): {error}") from error

    return wrapper


def _device_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The device, or devices, that a test is called with; otherwise those of its class."""
    for name in ("device", "devices"):
        if name in kwargs:
            return kwargs[name]
    return getattr(args[0], "device_type", None) if args else None


# -- helpers


@functools.cache
def initialize_cuda_context_rng() -> None:
    """Initialise CUDA and its random numbers on every device, once in each process."""
    if not flag("TEST_CUDA"):
        raise AssertionError("CUDA must be available when calling initialize_cuda_context_rng")
    for index in range(torch.cuda.device_count()):
        torch.randn(1, device=f"cuda:{index}")


def gcIfJetson(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Collect garbage before the test on a Jetson, where host and device share one small memory."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if flag("IS_JETSON"):
            gc.collect()
            torch.cuda.empty_cache()
        return fn(*args, **kwargs)

    return wrapper


def device_sleep(device: str, cycles: int) -> None:
    """Keep the device's current stream (for the CPU, this process) busy for about `cycles` cycles."""
    if device == "cpu":
        for _ in range(cycles):
            pass
    else:
        torch.get_device_module(device)._sleep(cycles)


@functools.cache
def get_cycles_per_ms(device: str = "cuda") -> float:
    """Return how many cycles of `device_sleep` take a millisecond, the mean of ten measurements without extremes."""
    measure = _cycles_per_ms_of_cpu if device == "cpu" else _cycles_per_ms_of_device
    measurements = sorted(measure(device) for _ in range(10))
    middle = measurements[2:8]
    return sum(middle) / len(middle)


def _cycles_per_ms_of_cpu(device: str) -> float:
    start = time.perf_counter()
    device_sleep(device, CYCLES)
    return CYCLES / (1000 * (time.perf_counter() - start))


def _cycles_per_ms_of_device(device: str) -> float:
    module = torch.get_device_module(device)
    start = module.Event(enable_timing=True)
    end = module.Event(enable_timing=True)
    start.record()
    device_sleep(device, CYCLES)
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return CYCLES / milliseconds


# --------------------------------------------------------------------------------------------------------------------
# Checks of the machine for tests of collectives: multicast, symmetric memory, ROCm versions, EFA.

# ROCm devices on which symmetric memory works.
_ROCM_WITH_SYMM_MEM = ("gfx942", "gfx950")


def _on_rocm() -> bool:
    return torch.version.hip is not None


def requires_multicast_support() -> Decorator:
    """Skip where the CUDA devices do not support multicast."""
    on_cuda = accelerators.accelerator_type() == "cuda"
    has_it = on_cuda and bool(accelerators.cuda_properties().get("multicast"))
    return unittest.skipUnless(has_it, "multicast support is not available")


def evaluate_platform_supports_symm_mem() -> bool:
    """Do the devices of this machine support symmetric memory?"""
    if accelerators.accelerator_type() != "cuda":
        return False
    return not _on_rocm() or any(arch in getRocmArchName() for arch in _ROCM_WITH_SYMM_MEM)


PLATFORM_SUPPORTS_SYMM_MEM = LazyVal(evaluate_platform_supports_symm_mem)


def skip_if_rocm_arch_multiprocess(arch: tuple[str, ...]) -> Decorator:
    """Skip on ROCm devices of these architectures."""
    return unittest.skipIf(_on_rocm() and isRocmArchAnyOf(arch), f"does not run on ROCm's {', '.join(arch)}")


def skip_if_rocm_ver_lessthan_multiprocess(version: Sequence[int] | None = None) -> Decorator:
    """Skip on an older ROCm; without a version, on every ROCm."""
    older = _on_rocm() and (version is None or getRocmVersion() < tuple(version))
    return unittest.skipIf(older, f"needs ROCm {version} or newer")


def skip_if_rocm_ver_atleast_multiprocess(version: Sequence[int] | None = None) -> Decorator:
    """Skip on this version of ROCm and newer ones."""
    newer = _on_rocm() and version is not None and getRocmVersion() >= tuple(version)
    return unittest.skipIf(newer, f"does not run on ROCm {version} and newer")


def sm_is_or_higher_than(device: torch.device, major: int, minor: int) -> bool:
    """Does a CUDA device have this compute capability? False for ROCm, true for devices of other types."""
    if device.type != "cuda":
        return True
    capabilities = accelerators.cuda_properties()["capabilities"]
    return not _on_rocm() and tuple(capabilities[device.index or 0]) >= (major, minor)


@functools.cache
def has_efa() -> bool:
    """Does the machine have AWS Elastic Fabric Adapters and the libfabric provider for them?"""
    if shutil.which("fi_info") is None:
        return False
    command = ["fi_info", "-p", "efa", "-t", "FI_EP_RDM"]
    result = subprocess.run(command, capture_output=True, check=False)
    return result.returncode == 0


def tp_transports() -> list[str] | None:
    """Return the transports that TensorPipe may use; None for all. Its InfiniBand transport fails with EFA."""
    return ["shm", "uv"] if has_efa() else None


@contextmanager
def core_dumps_disabled() -> Iterator[None]:
    """Turn core dumps off: with them on, ROCm aborts on a device's exception instead of raising it, as CUDA does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
