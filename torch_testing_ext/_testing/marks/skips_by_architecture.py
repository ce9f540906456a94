"""Skips, expected failures and helpers for particular devices."""

import functools
import gc
import time
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_testing_ext._machine import accelerators, cuda
from torch_testing_ext._machine.flags import flag
from torch_testing_ext._torch import fsdp_parts
from torch_testing_ext._torch.devices import cuda_state
from torch_testing_ext._torch.signs import error_texts

from .parametrized import Decorator as Decorator
from .skips import bare_or_called, lazy_skip_if, skip_but_pass_in_sandcastle_if, xfail_where

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
            if not error_texts.is_of_missing_triton(error):
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
        cuda_state.keep_busy(device, cycles)


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
