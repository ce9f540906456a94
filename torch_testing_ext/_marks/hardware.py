"""Decorators and helpers for particular devices: architecture, peer access, keeping a stream busy."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.flags import flag

from .skips import Decorator, lazy_skip_if, skip_but_pass_in_sandcastle_if

MI350_ARCH = ("gfx950",)
MI300_ARCH = ("gfx942",)
MI200_ARCH = ("gfx90a",)
NAVI_ARCH = ("gfx1030", "gfx1100", "gfx1101", "gfx1200", "gfx1201")
NAVI3_ARCH = ("gfx1100", "gfx1101")
NAVI4_ARCH = ("gfx1200", "gfx1201")

CYCLES = 1_000_000


def getRocmArchName(device_index: int = 0) -> str:
    return torch.cuda.get_device_properties(device_index).gcnArchName


def isRocmArchAnyOf(arch: Sequence[str]) -> bool:
    return torch.version.hip is not None and any(name in getRocmArchName() for name in arch)


def skipIfRocmArch(arch: Sequence[str]) -> Decorator:
    return lazy_skip_if(lambda: flag("TEST_WITH_ROCM") and isRocmArchAnyOf(arch), f"test skipped on {arch}")


def runOnRocmArch(arch: Sequence[str]) -> Decorator:
    """On ROCm, run on these architectures only."""
    return lazy_skip_if(lambda: flag("TEST_WITH_ROCM") and not isRocmArchAnyOf(arch), f"test only runs on {arch}")


def getRocmVersion() -> tuple[int, int]:
    major, minor = (torch.version.hip or "0.0").split("-")[0].split(".")[:2]
    return int(major), int(minor)


def skipIfRocmVersionLessThan(version: Sequence[int] | None = None) -> Decorator:
    def is_older() -> bool:
        return flag("TEST_WITH_ROCM") and (version is None or getRocmVersion() < tuple(version))

    return lazy_skip_if(is_older, f"ROCm version {version} or later required")


def requires_cuda_p2p_access() -> Decorator:
    """Skip unless every CUDA device can read the memory of every other, which requires compute capability 8.0."""
    return skip_but_pass_in_sandcastle_if(not accelerators.peers_have_access(), "cuda p2p access is not available")


def skipIfWindowsXPU(func: Any = None, *, msg: str = "test doesn't currently work on the Windows stack") -> Any:
    decorator = lazy_skip_if(lambda: flag("IS_WINDOWS") and flag("TEST_XPU"), f"skipIfWindowsXPU: {msg}")
    return decorator if func is None else decorator(func)


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
    return statistics.mean(sorted(measure(device) for _ in range(10))[2:8])


def _cycles_per_ms_of_cpu(device: str) -> float:
    start = time.perf_counter()
    device_sleep(device, CYCLES)
    return CYCLES / (1000 * (time.perf_counter() - start))


def _cycles_per_ms_of_device(device: str) -> float:
    module = torch.get_device_module(device)
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    start.record()
    device_sleep(device, CYCLES)
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return CYCLES / milliseconds
