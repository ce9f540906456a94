"""Work that keeps a device busy for a known time, and the state of its memory and its generator."""

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from torch_testing_ext._machine.flags import flag
from torch_testing_ext._torch.devices import cuda_state

CYCLES = 1_000_000


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
