"""Bases and decorators for tests of torch.distributed, under the names of torch.testing._internal.common_distributed.

Importing this asks no accelerator for anything. Whether a test can run is decided in the parent, before there are
ranks, wherever it can be.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as c10d

from torch_testing_ext import common_utils
from torch_testing_ext._cases.continuous import MultiProcContinuousTest
from torch_testing_ext._cases.distributed_base import DistributedTestBase, run_subtests
from torch_testing_ext._cases.global_state import GlobalStateWarning
from torch_testing_ext._cases.multi_process import MultiProcessTestCase
from torch_testing_ext._cases.multi_threaded import MultiThreadedTestCase, spawn_threads_and_init_comms
from torch_testing_ext._cases.ranked import (
    DEFAULT_WORLD_SIZE,
    TIMEOUT_DEFAULT,
    TIMEOUT_OVERRIDE,
    Interrupted,
    RankError,
    RankFailure,
    get_timeout,
)
from torch_testing_ext._fsdp.forward_inputs import SaveForwardInputsModel, SaveForwardInputsModule
from torch_testing_ext._machine import accelerators, environment
from torch_testing_ext._marks import needs
from torch_testing_ext._marks.needs import TEST_SKIPS, Need, TestSkip, needs_of, requires
from torch_testing_ext._marks.platforms import (
    PLATFORM_SUPPORTS_SYMM_MEM,
    core_dumps_disabled,
    evaluate_platform_supports_symm_mem,
    has_efa,
    requires_multicast_support,
    skip_if_rocm_arch_multiprocess,
    skip_if_rocm_ver_atleast_multiprocess,
    skip_if_rocm_ver_lessthan_multiprocess,
    sm_is_or_higher_than,
    tp_transports,
)
from torch_testing_ext._threads.group import ProcessLocalGroup
from torch_testing_ext.common_utils import (
    FILE_SCHEMA,
    LazyVal,
    TestCase,
    find_free_port,
    retry_on_connect_failures,
    skip_but_pass_in_sandcastle,
    skip_but_pass_in_sandcastle_if,
)

if TYPE_CHECKING:
    HAS_ACCELERATOR: bool

__all__ = [
    "ACCELERATOR_DIST_BACKENDS",
    "DDP_RANK_DEVICES",
    "DEFAULT_WORLD_SIZE",
    "PLATFORM_SUPPORTS_SYMM_MEM",
    "TEST_SKIPS",
    "TIMEOUT_DEFAULT",
    "TIMEOUT_OVERRIDE",
    "DistTestCases",
    "DistributedTestBase",
    "GlobalStateWarning",
    "Interrupted",
    "LazyVal",
    "MultiProcContinuousTest",
    "MultiProcessTestCase",
    "MultiThreadedTestCase",
    "ProcessLocalGroup",
    "RankError",
    "RankFailure",
    "SaveForwardInputsModel",
    "SaveForwardInputsModule",
    "TestCase",
    "TestSkip",
    "at_least_x_gpu",
    "captured_output",
    "cleanup_temp_dir",
    "core_dumps_disabled",
    "create_device",
    "create_tcp_store",
    "evaluate_platform_supports_symm_mem",
    "get_required_world_size",
    "get_timeout",
    "has_efa",
    "import_transformers_or_skip",
    "init_multigpu_helper",
    "initialize_temp_directories",
    "logger",
    "nccl_skip_if_lt_x_gpu",
    "needs_of",
    "require_n_gpus_for_nccl_backend",
    "requires_accelerator_dist_backend",
    "requires_ddp_rank",
    "requires_gloo",
    "requires_mpi",
    "requires_multicast_support",
    "requires_nccl",
    "requires_nccl_shrink",
    "requires_nccl_version",
    "requires_ucc",
    "requires_world_size",
    "requires_xccl",
    "run_subtests",
    "simple_sparse_reduce_tests",
    "skip_but_pass_in_sandcastle",
    "skip_but_pass_in_sandcastle_if",
    "skip_if_lt_x_gpu",
    "skip_if_no_gpu",
    "skip_if_odd_worldsize",
    "skip_if_rocm",
    "skip_if_rocm_arch_multiprocess",
    "skip_if_rocm_multiprocess",
    "skip_if_rocm_ver_atleast_multiprocess",
    "skip_if_rocm_ver_lessthan_multiprocess",
    "skip_if_small_worldsize",
    "skip_if_win32",
    "sm_is_or_higher_than",
    "spawn_threads_and_init_comms",
    "tp_transports",
    "verify_ddp_error_logged",
    "with_dist_debug_levels",
    "with_nccl_blocking_wait",
]

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

logger = logging.getLogger(__name__)

ACCELERATOR_DIST_BACKENDS = ["nccl", "xccl", "hccl"]
DDP_RANK_DEVICES = ["cuda", "xpu"]


# What is handed on from common_utils, and found out when it is first asked for. Not by `import *`, as the bases that
# need the compiler: to ask the machine, or to import that, is not what a test file means by it.
_FLAGS = {"IS_SANDCASTLE", "TEST_CUDA", "TEST_HPU", "TEST_WITH_ROCM", "TEST_WITH_TSAN", "TEST_XPU"}


def __getattr__(name: str) -> Any:
    if name in _FLAGS:
        return getattr(common_utils, name)
    if name == "HAS_ACCELERATOR":
        return common_utils.TEST_CUDA or common_utils.TEST_HPU or common_utils.TEST_XPU
    if name.startswith("DynamoDistributed"):
        from torch_testing_ext._cases import dynamo_bases

        return getattr(dynamo_bases, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class DistTestCases:
    """Which backends lack a collective, and which have a feature."""

    skip_collective: ClassVar[dict[str, set[str]]] = {
        "allgather_coalesced": {"nccl", "mpi", "ucc", "xccl"},
        "reduce": set(),
        "sendrecv anysource": {"nccl", "ucc", "xccl"},
        "cpu barrier": {"nccl", "ucc", "xccl"},
    }
    backend_feature: ClassVar[dict[str, set[str]]] = {
        "gpu": {"nccl", "gloo", "ucc", "xccl"},
        "cuda": {"nccl", "gloo", "ucc"},
        "ddp": {"nccl", "gloo", "ucc", "xccl"},
        "subgroup": {"nccl", "gloo", "ucc", "xccl"},
        "plugin": set(),
        "hpu": {"hccl"},
        "xpu": {"xccl"},
    }


def requires_ddp_rank(device: str) -> bool:
    return device in DDP_RANK_DEVICES


# -- devices


def at_least_x_gpu(x: int) -> bool:
    return accelerators.device_count() >= x


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Decorator:
    """Skip with fewer than `x` accelerators. With `allow_cpu` a machine that has none at all runs the test on CPU."""
    return requires(needs.devices(x, allow_cpu))


def skip_if_no_gpu(func: F) -> F:
    """Skip where not every rank of WORLD_SIZE can have an accelerator of its own."""

    def unmet() -> TestSkip | None:
        here = accelerators.device_count()
        if here == 0:
            return TEST_SKIPS["no_accelerator"]
        wanted = _world_size_in_environ()
        return needs.too_few_devices(wanted) if here < wanted else None

    return requires(Need(unmet, devices=1))(func)


def nccl_skip_if_lt_x_gpu(backend: str, x: int) -> Decorator:
    """Skip with fewer than `x` accelerators, if the backend is NCCL."""
    return requires(needs.devices(x)) if backend == "nccl" else _as_it_is


def require_n_gpus_for_nccl_backend(n: int, backend: str) -> Decorator:
    """The same, its arguments the other way round."""
    return nccl_skip_if_lt_x_gpu(backend, n)


def requires_world_size(n: int) -> Decorator:
    """Ask for `n` ranks, each with an accelerator of its own; a harness reads it with `get_required_world_size`."""
    lacking = needs.devices(n)

    def unmet() -> TestSkip | None:
        found = accelerators.device_count()
        message = f"requires {n} accelerators, found {found}"
        return lacking.unmet() and TestSkip(needs.too_few_devices(n).exit_code, message)

    return requires(Need(unmet, devices=n, world_size=n))


def get_required_world_size(obj: Any, default: int) -> int:
    """What the test that `obj` is about to run asked for by `requires_world_size`, else `default`."""
    current = getattr(obj, "_current_test_name", None)
    name = current() if callable(current) else getattr(obj, "_testMethodName", "")
    wanted = getattr(getattr(obj, name, None), "_required_world_size", default)
    return int(wanted)


def _as_it_is(func: F) -> F:
    return func


# -- world size


def _world_size_in_environ() -> int:
    return int(os.environ["WORLD_SIZE"])


def _unless_mpi(skip: Callable[[int], bool], name: str) -> Need:
    def unmet() -> TestSkip | None:
        unsuited = os.environ.get("BACKEND") != "mpi" and skip(_world_size_in_environ())
        return TEST_SKIPS[name] if unsuited else None

    return Need(unmet)


def skip_if_small_worldsize(func: F) -> F:
    return requires(_unless_mpi(lambda size: size < 8, "small_worldsize"))(func)


def skip_if_odd_worldsize(func: F) -> F:
    return requires(_unless_mpi(lambda size: size % 2 == 1, "odd_worldsize"))(func)


# -- backends. On functions and on classes, hence unittest's own skip.


def _requires_backend(name: str, available: bool) -> Callable[[Any], Any]:
    reason = f"c10d was not compiled with the {name.upper()} backend"

    def decorate(thing: Any) -> Any:
        need = Need(lambda: None if available else TEST_SKIPS["backend_unavailable"], backend=name)
        setattr(thing, needs.ATTRIBUTE, (need, *needs_of(thing)))
        return unittest.skipUnless(available, reason)(thing)

    return decorate


def requires_gloo() -> Callable[[Any], Any]:
    return _requires_backend("gloo", c10d.is_gloo_available())


def requires_nccl() -> Callable[[Any], Any]:
    return _requires_backend("nccl", c10d.is_nccl_available())


def requires_ucc() -> Callable[[Any], Any]:
    return _requires_backend("ucc", c10d.is_ucc_available())


def requires_mpi() -> Callable[[Any], Any]:
    return _requires_backend("mpi", c10d.is_mpi_available())


def requires_xccl() -> Callable[[Any], Any]:
    return _requires_backend("xccl", c10d.is_xccl_available())


def requires_nccl_version(version: tuple[int, ...], msg: str) -> Callable[[Any], Any]:
    """Skip where NCCL is older. Says nothing of machines without CUDA: other decorators do."""
    if accelerators.accelerator_type() != "cuda":
        return _as_it_is
    if not c10d.is_nccl_available():
        return requires_nccl()
    found = torch.cuda.nccl.version()
    return unittest.skipIf(found < version, f"Requires NCCL {version} or newer, found {found}: {msg}")


def requires_nccl_shrink() -> Callable[[Any], Any]:
    return requires_nccl_version((2, 27), "groups can be shrunk since then")


def requires_accelerator_dist_backend(backends: Iterable[str] | None = None) -> Callable[[Any], Any]:
    """Skip where torch has none of these backends (default: of those for accelerators)."""
    wanted = list(ACCELERATOR_DIST_BACKENDS if backends is None else backends)
    known = {
        "nccl": c10d.is_nccl_available,
        "xccl": c10d.is_xccl_available,
        "hccl": lambda: accelerators.accelerator_type() == "hpu",
    }
    available = any(known[name]() for name in wanted if name in known)
    return unittest.skipUnless(available, f"No accelerator communication backend available among {wanted}")


# -- platforms and imports


def skip_if_win32() -> Callable[[Any], Any]:
    return unittest.skipIf(sys.platform == "win32", "This test does not run on Windows")


def skip_if_rocm(func: F) -> F:
    return unittest.skipIf(torch.version.hip is not None, TEST_SKIPS["skipIfRocm"].message)(func)


skip_if_rocm_multiprocess = skip_if_rocm


def import_transformers_or_skip() -> Decorator:
    def unmet() -> TestSkip | None:
        return None if find_spec("transformers") else TEST_SKIPS["importerror"]

    return requires(Need(unmet))


# -- environment of a test


def with_nccl_blocking_wait(func: F) -> F:
    """NCCL waits block while the test runs, and errors are not handled asynchronously."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with environment.changed(TORCH_NCCL_ASYNC_ERROR_HANDLING=None, TORCH_NCCL_BLOCKING_WAIT="1"):
            return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def with_dist_debug_levels(levels: Iterable[str]) -> Decorator:
    """Run the test once at each level of TORCH_DISTRIBUTED_DEBUG. The process group must outlive it."""

    def decorate(func: F) -> F:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = None
            for level in levels:
                with environment.changed(TORCH_DISTRIBUTED_DEBUG=level):
                    c10d.set_debug_level_from_env()
                    result = func(*args, **kwargs)
                    c10d.barrier()
            c10d.set_debug_level_from_env()
            return result

        return wrapper  # type: ignore[return-value]

    return decorate


@contextmanager
def captured_output() -> Iterator[tuple[StringIO, StringIO]]:
    """What is printed through sys.stdout and sys.stderr meanwhile."""
    before = sys.stdout, sys.stderr
    out, err = StringIO(), StringIO()
    sys.stdout, sys.stderr = out, err
    try:
        yield out, err
    finally:
        sys.stdout, sys.stderr = before


# -- stores, devices, directories


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
    """A TCPStore on a port that is free now; tried again where somebody else took it meanwhile."""
    port = find_free_port()
    if jit_class:
        milliseconds = int(timeout / timedelta(milliseconds=1))
        return torch.classes.dist_c10d.TCPStore(addr, port, world_size, is_master, milliseconds)
    return c10d.TCPStore(
        addr, port, world_size, is_master, timeout, wait_for_workers=wait_for_workers, use_libuv=use_libuv
    )


def create_device(interface: str | None = None, lazy_init: bool = False) -> Any:
    """A gloo device on an interface, or on the loop-back address."""
    if sys.platform == "win32" or interface is None:
        return c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=lazy_init)
    return c10d.ProcessGroupGloo.create_device(interface=interface, lazy_init=lazy_init)


def init_multigpu_helper(world_size: int, backend: str) -> dict[int, list[int]]:
    """Which devices each rank uses: the one of its own number; none where there are fewer devices than ranks."""
    enough = accelerators.device_count() >= world_size
    return {rank: [rank] if enough else [] for rank in range(world_size)}


tmp_dir: tempfile.TemporaryDirectory[str] | None = None


def initialize_temp_directories(init_method: str | None = None) -> None:
    """Make the directories that PyTorch's older suites share between ranks, and name them in the environment."""
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


# -- what several of PyTorch's suites check in common


def verify_ddp_error_logged(model_DDP: Any, err_substr: str) -> None:
    """DDP has recorded this error, and the iteration it came in."""
    logged = model_DDP._get_ddp_logging_data()
    for key in ("iteration", "has_error", "error"):
        if key not in logged:
            raise AssertionError(f"DDP's logging data has no {key!r}: {sorted(logged)}")
    wanted = err_substr.partition("\nException raised from ")[0]
    if wanted not in logged["error"]:
        raise AssertionError(f"{wanted!r} is not in the error that DDP logged: {logged['error']!r}")


def simple_sparse_reduce_tests(rank: int, world_size: int, num_inputs: int = 1) -> list[tuple[list[Any], list[Any]]]:
    """Inputs of this rank and the expected sums for a sparse all-reduce: 1 to 3 sparse, then 1 to 3 dense dims."""
    total = num_inputs * world_size
    shapes = [(sparse, 0) for sparse in (1, 2, 3)] + [(1, dense) for dense in (1, 2, 3)]
    cases = []
    for sparse_dims, dense_dims in shapes:
        every = [_sparse_input(number, total, sparse_dims, dense_dims) for number in range(total)]
        mine = every[num_inputs * rank : num_inputs * (rank + 1)]
        summed = functools.reduce(torch.add, every)
        cases.append((mine, [summed for _ in range(num_inputs)]))
    return cases


def _sparse_input(number: int, total: int, sparse_dims: int, dense_dims: int) -> Any:
    """Ones at 0..number in the first sparse dim, at 0 in the others: any two overlap, none are equal."""
    count = number + 1
    indices = torch.cat([torch.arange(count).reshape(1, count), torch.zeros(sparse_dims - 1, count, dtype=torch.int64)])
    shape = [total, *[2] * dense_dims, *[total] * (sparse_dims - 1)]
    if sparse_dims == 1:
        shape = [total, *[2] * dense_dims]
    return torch.sparse_coo_tensor(indices, torch.ones(count, *[2] * dense_dims), shape)
