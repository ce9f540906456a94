"""Ways to run a function or a test: again after an exception, in several threads, with a setting for its time."""

import contextlib
import functools
import threading
import time
import unittest
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from torch_testing_ext._torch import compiler_state

from .contexts import DeterministicGuard, changed_environment, set_default_dtype, within


def retry(
    ExceptionToCheck: Any, tries: int = 3, delay: float = 3, skip_after_retries: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call the function again after these exceptions, `tries` times in all, with `delay` seconds in between.

    The last exception is raised, or becomes a skip.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        """Retry calls of a function."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for left in reversed(range(max(1, tries))):
                try:
                    return function(*args, **kwargs)
                except ExceptionToCheck as error:
                    if not left and not skip_after_retries:
                        raise
                    if not left:
                        raise unittest.SkipTest(f"Skipping after {tries} consecutive {error}") from error
                    print(f"{error}, Retrying in {delay} seconds...")
                    time.sleep(delay)
            raise AssertionError

        return wrapper

    return decorate


def run_concurrently(
    worker_func: Callable[..., Any] | Iterable[Callable[..., Any]],
    num_threads: int | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    """Call a function in `num_threads` threads, or each of several functions in one, all at once; return the results.

    An exception in a thread is raised here, when all threads have ended.
    """
    if isinstance(worker_func, Iterable):
        functions = list(worker_func)
    elif num_threads is None:
        raise TypeError("a single function needs num_threads")
    else:
        functions = [worker_func] * num_threads
    if num_threads is not None and num_threads != len(functions):
        raise ValueError(f"{len(functions)} functions cannot run in {num_threads} threads")
    all_here = threading.Barrier(len(functions))

    def work(function: Callable[..., Any]) -> Any:
        all_here.wait()
        return function(*args, **(kwargs or {}))

    with ThreadPoolExecutor(len(functions)) as pool:
        running = [pool.submit(work, function) for function in functions]
    return [future.result() for future in running]


class set_default_dtype_if_supported:
    """Sets the default dtype for a device-type test, if the primary device of its class has it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(test: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                torch.empty(0, device=test.get_primary_device(), dtype=self._dtype)
            except TypeError:
                return fn(test, *args, **kwargs)
            with set_default_dtype(self._dtype):
                return fn(test, *args, **kwargs)

        return wrapper


class SwapTensorsGuard:
    """Sets whether converting a module swaps its parameters, for the length of a `with`; None keeps the setting."""

    def __init__(self, use_swap_tensors: bool | None) -> None:
        self.use_swap_tensors = use_swap_tensors

    def __enter__(self) -> None:
        self._before = torch.__future__.get_swap_module_params_on_conversion()
        if self.use_swap_tensors is not None:
            torch.__future__.set_swap_module_params_on_conversion(self.use_swap_tensors)

    def __exit__(self, *_: object) -> None:
        torch.__future__.set_swap_module_params_on_conversion(self._before)


def wrapSwapTensorsTest(swap: bool | None = None) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    return within(lambda: SwapTensorsGuard(swap))


def wrapDeterministicFlagAPITest(fn: Callable[..., Any]) -> Callable[..., None]:
    """Keep what a test does to the flags of deterministic algorithms, and configure cuBLAS for them."""
    return within(_deterministic_flags_kept)(fn)


@contextlib.contextmanager
def _deterministic_flags_kept() -> Iterator[None]:
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    guard = DeterministicGuard(flags[0], warn_only=flags[1])
    with guard, changed_environment(CUBLAS_WORKSPACE_CONFIG=":4096:8"):
        yield


def runWithoutCompiledAutograd(
    msg: str = "test doesn't currently work with compiled autograd",
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    if not isinstance(msg, str):
        raise AssertionError("write @runWithoutCompiledAutograd() or @runWithoutCompiledAutograd('reason')")
    return within(compiler_state.without_compiled_autograd)


def find_library_location(lib_name: str) -> Path:
    path = Path(torch.__file__).resolve().parent / "lib" / lib_name
    if not path.exists():
        raise FileNotFoundError(f"torch has no library {lib_name!r} in {path.parent}")
    return path
