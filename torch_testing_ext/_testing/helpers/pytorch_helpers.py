"""Small helpers that PyTorch's tests import."""

import contextlib
import functools
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from torch_testing_ext._machine import accelerators, device_rules
from torch_testing_ext._machine.flags import flag
from torch_testing_ext._machine.machine_resources import find_free_port, retry_on_connect_failures
from torch_testing_ext._process.source_files import source_file
from torch_testing_ext._torch import compiler_state

from .contexts import DeterministicGuard, changed_environment, set_default_dtype, within

# --------------------------------------------------------------------------------------------------------------------
# Decorators for tests of checkpoints.


def with_temp_dir(func: Callable[..., Any] | None = None) -> Any:
    """Run a test method with `self.temp_dir`: an empty directory, common to all ranks, removed when all are done.

    Place it below `with_comms`: the ranks agree on the directory through their group. Without a group, each caller has
    a directory of its own.
    """
    assert func is not None, "with_temp_dir takes no arguments: write @with_temp_dir"

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        self.temp_dir = _common_directory()
        try:
            func(self, *args, **kwargs)
        except BaseException:
            # No barrier: other ranks may never reach it, and an error in it would hide the test's own.
            if _is_owner():
                shutil.rmtree(self.temp_dir, ignore_errors=True)
            raise
        if dist.is_initialized():
            dist.barrier()
        if _is_owner():
            shutil.rmtree(self.temp_dir, ignore_errors=True)

    return wrapper


def _is_owner() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _common_directory() -> str:
    directory = [tempfile.mkdtemp() if _is_owner() else ""]
    if dist.is_initialized():
        try:
            dist.broadcast_object_list(directory)
        except BaseException:
            with suppress(OSError):
                shutil.rmtree(directory[0])
            raise
    return directory[0]


def with_checkpoint_logging(
    func: Callable[..., Any] | None = None, logger_name: str = "torch.distributed.checkpoint", level: int = logging.INFO
) -> Any:
    """Run a test method with a logger, by default that of checkpoints, set to `level`."""
    assert func is not None, "write @with_checkpoint_logging, or with_checkpoint_logging(func, level=...)"

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        logger = logging.getLogger(logger_name)
        before = logger.level
        logger.setLevel(level)
        try:
            func(self, *args, **kwargs)
        finally:
            logger.setLevel(before)

    return wrapper


# --------------------------------------------------------------------------------------------------------------------
# Checks, inputs and settings that several of PyTorch's distributed suites share.


def verify_ddp_error_logged(model_DDP: Any, err_substr: str) -> None:
    """Assert that DDP recorded this error and the iteration in which it occurred."""
    logged = model_DDP._get_ddp_logging_data()
    for key in ("iteration", "has_error", "error"):
        if key not in logged:
            raise AssertionError(f"DDP's logging data has no {key!r}: {sorted(logged)}")
    wanted = err_substr.partition("\nException raised from ")[0]
    if wanted not in logged["error"]:
        raise AssertionError(f"{wanted!r} is not in the error that DDP logged: {logged['error']!r}")


def simple_sparse_reduce_tests(rank: int, world_size: int, num_inputs: int = 1) -> list[tuple[list[Any], list[Any]]]:
    """Return inputs of this rank and expected sums of a sparse all-reduce: 1 to 3 sparse, then 1 to 3 dense dims."""
    total = num_inputs * world_size
    first = num_inputs * rank
    cases = []
    # The numbers of sparse and of dense dims.
    for sparse_dims, dense_dims in ((1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (1, 3)):
        inputs = [_sparse_input(number, total, sparse_dims, dense_dims) for number in range(total)]
        own = inputs[first : first + num_inputs]
        total_of_all = functools.reduce(torch.add, inputs)
        cases.append((own, [total_of_all] * num_inputs))
    return cases


def _sparse_input(number: int, total: int, sparse_dims: int, dense_dims: int) -> Any:
    """Ones at 0..number in the first sparse dim, at 0 in the others: any two overlap, none are equal."""
    count = number + 1
    first_dim = torch.arange(count).reshape(1, count)
    others = torch.zeros(sparse_dims - 1, count, dtype=torch.int64)
    dense_shape = [2] * dense_dims
    shape = [total, *dense_shape]
    shape += [total] * (sparse_dims - 1)
    values = torch.ones(count, *dense_shape)
    return torch.sparse_coo_tensor(torch.cat([first_dim, others]), values, shape)


# -- settings of torch.distributed while a test runs


F = TypeVar("F", bound=Callable[..., Any])

# Its type stubs lack what comes from C++.
c10d: Any = dist


def with_nccl_blocking_wait(func: F) -> F:
    """Run the test with blocking NCCL waits and without asynchronous error handling."""
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": None, "TORCH_NCCL_BLOCKING_WAIT": "1"}
    decorate = within(lambda: changed_environment(**variables))
    return decorate(func)


def with_dist_debug_levels(levels: Iterable[str]) -> Callable[[F], F]:
    """Run the test once at each level of TORCH_DISTRIBUTED_DEBUG. The test must not destroy its process group."""

    def decorate(func: F) -> F:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = None
            for level in levels:
                with changed_environment(TORCH_DISTRIBUTED_DEBUG=level):
                    c10d.set_debug_level_from_env()
                    result = func(*args, **kwargs)
                    c10d.barrier()
            c10d.set_debug_level_from_env()
            return result

        return wrapper  # type: ignore[return-value]

    return decorate


# --------------------------------------------------------------------------------------------------------------------
# Small helpers that PyTorch's distributed tests import from common_utils.

GRADCHECK_NONDET_TOL = 1e-12
# The precisions that PyTorch's oldest tests assume; its name asks not to use it in new ones.
dtype2prec_DONTUSE = {torch.float: 1e-5, torch.double: 1e-5, torch.half: 1e-2, torch.bfloat16: 1e-1}


def _gradcheck_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Check batched gradients too, in fast mode unless PYTORCH_TEST_WITH_SLOW_GRADCHECK=1."""
    defaults = {"check_batched_grad": True, "fast_mode": not flag("TEST_WITH_SLOW_GRADCHECK")}
    return {**defaults, **{name: value for name, value in options.items() if value is not None}}


def gradcheck(fn: Any, inputs: Any, **kwargs: Any) -> bool:
    """Call `torch.autograd.gradcheck` with stricter defaults."""
    return torch.autograd.gradcheck(fn, inputs, **_gradcheck_defaults(kwargs))


def gradgradcheck(fn: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> bool:
    """Call `torch.autograd.gradgradcheck` with stricter defaults."""
    return torch.autograd.gradgradcheck(fn, inputs, grad_outputs, **_gradcheck_defaults(kwargs))


# -- tests


def mock_wrapper(method: Any) -> Any:
    """Wrap a method so that `.mock` records every call."""
    from unittest.mock import MagicMock

    mock = MagicMock()

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        mock(*args, **kwargs)
        return method(self, *args, **kwargs)

    wrapper.mock = mock  # type: ignore[attr-defined]
    return wrapper


def raise_on_run_directly(file_to_call: str) -> NoReturn:
    raise RuntimeError(f"This test file cannot run by itself; use: python {file_to_call} TESTNAME")


def load_tests(loader: Any, tests: Any, pattern: Any) -> unittest.TestSuite:
    """The `load_tests` hook of unittest, for a test module to import: refuses test cases defined in another file."""
    suite = unittest.TestSuite()
    for group in tests:
        for test in group:
            if not flag("DISABLE_RUNNING_SCRIPT_CHK"):
                _check_defined_in_script(test)
        if group.countTestCases():
            suite.addTest(group)
    return suite


def _check_defined_in_script(test: Any) -> None:
    script = os.path.realpath(sys.argv[0])
    home = source_file(type(test))
    if script.endswith(".py") and home and os.path.realpath(home) != script:
        raise AssertionError(
            f"{test.id()} is defined in {home}, not in {script}, the script that is running: an imported test case "
            "runs twice. Import the module instead of the class."
        )


# -- NumPy


_NUMPY_SCALARS = "bool_ uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"


def numpy_to_torch_dtypes() -> dict[Any, torch.dtype]:
    """Map NumPy's scalar types to torch's dtypes. Imports NumPy."""
    import numpy

    return {getattr(numpy, name): getattr(torch, name.rstrip("_")) for name in _NUMPY_SCALARS.split()}


def torch_to_numpy_dtypes() -> dict[torch.dtype, Any]:
    """Map torch's dtypes to NumPy's scalar types, two of them to larger ones. Imports NumPy."""
    import numpy

    same = {dtype: scalar for scalar, dtype in numpy_to_torch_dtypes().items()}
    return {**same, torch.bfloat16: numpy.float32, torch.complex32: numpy.complex64}


class HardwareClassification(Enum):
    """The hardware that a test class is for: any (GENERIC), every accelerator, or devices of one type."""

    GENERIC = "generic"
    ACCELERATOR = "accelerator"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"
    XPU = "xpu"


def get_hw_classification(test_case_cls: type) -> HardwareClassification | None:
    """Return a test class's own declaration; None without one."""
    declared = getattr(test_case_cls, "hw_classification", None)
    if declared is None or isinstance(declared, HardwareClassification):
        return declared
    name = f"{test_case_cls.__module__}.{test_case_cls.__name__}"
    raise TypeError(f"{name}.hw_classification must be a HardwareClassification")


# --------------------------------------------------------------------------------------------------------------------
# Ways to run a function or a test: again after an exception, in several threads, with a setting for its time.


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


# -- settings for the time of a test


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


# --------------------------------------------------------------------------------------------------------------------
# Stores, gloo devices and shared directories, as PyTorch's older distributed suites create them.

# Its type stubs lack what comes from C++.

FILE_SCHEMA = "file:///" if sys.platform == "win32" else "file://"


@retry_on_connect_failures
def create_tcp_store(
    addr: str = "localhost",
    world_size: int = 1,
    is_master: bool = True,
    timeout: timedelta = timedelta(minutes=5),
    wait_for_workers: bool = True,
    jit_class: bool = False,
    use_libuv: bool = True,
) -> Any:
    """Create a TCPStore on a free port; retry where another process takes the port first."""
    port = find_free_port()
    if jit_class:
        milliseconds = int(timeout / timedelta(milliseconds=1))
        return torch.classes.dist_c10d.TCPStore(addr, port, world_size, is_master, milliseconds)
    return c10d.TCPStore(
        addr, port, world_size, is_master, timeout, wait_for_workers=wait_for_workers, use_libuv=use_libuv
    )


def create_device(interface: str | None = None, lazy_init: bool = False) -> Any:
    """Create a gloo device on an interface, or on the loopback address."""
    if sys.platform == "win32" or interface is None:
        return c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=lazy_init)
    return c10d.ProcessGroupGloo.create_device(interface=interface, lazy_init=lazy_init)


def init_multigpu_helper(world_size: int, backend: str) -> dict[int, list[int]]:
    """Map each rank to its devices: the one with its own number; none where there are fewer devices than ranks.

    Ranks that may share devices have one, too.
    """
    count, enough = accelerators.device_count(), accelerators.most_ranks() >= world_size
    return {rank: [device_rules.device_of(rank, count)] if enough else [] for rank in range(world_size)}


tmp_dir: tempfile.TemporaryDirectory[str] | None = None


def initialize_temp_directories(init_method: str | None = None) -> None:
    """Create the directories that PyTorch's older suites share between ranks, and name them in the environment."""
    global tmp_dir
    tmp_dir = tempfile.TemporaryDirectory()
    for name in ("barrier", "test_dir", "init_dir"):
        os.mkdir(os.path.join(tmp_dir.name, name))
    os.environ["TEMP_DIR"] = tmp_dir.name
    shared = os.path.join(tmp_dir.name, "init_dir", "shared_init_file")
    os.environ["INIT_METHOD"] = FILE_SCHEMA + shared if init_method is None else init_method


def cleanup_temp_dir() -> None:
    if tmp_dir is not None:
        tmp_dir.cleanup()
