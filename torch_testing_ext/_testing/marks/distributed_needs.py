"""The devices, ranks, backends and platforms that a distributed test needs."""

import functools
import os
import sys
import unittest
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.distributed as c10d

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.backend_names import NCCL, uses_nccl

from .needs import ATTRIBUTE, TEST_SKIPS, F, Need, TestSkip, devices, needs_of, requires, too_few_devices

ACCELERATOR_DIST_BACKENDS = ["nccl", "xccl", "hccl"]
DDP_RANK_DEVICES = ["cuda", "xpu"]


class DistTestCases:
    """Tables of the backends that lack a collective and of those that have a feature."""

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
    return accelerators.most_ranks() >= max(x, 1)


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Callable[[F], F]:
    """Decorator: skip with fewer than `x` accelerators. With `allow_cpu`, run on the CPU if there are none."""
    return requires(devices(x, allow_cpu))


def skip_if_no_gpu(func: F) -> F:
    """Skip with fewer accelerators than the ranks in WORLD_SIZE."""

    def unmet() -> TestSkip | None:
        available = accelerators.most_ranks()
        if available == 0:
            return TEST_SKIPS["no_accelerator"]
        wanted = _world_size_in_environ()
        return too_few_devices(wanted) if available < wanted else None

    return requires(Need(unmet, devices=1))(func)


def nccl_skip_if_lt_x_gpu(backend: str, x: int) -> Callable[[F], F]:
    """Skip with fewer than `x` accelerators, if the backend is NCCL, by whichever of its names."""
    if not uses_nccl(backend):
        return _unchanged
    return requires(devices(x))


def require_n_gpus_for_nccl_backend(n: int, backend: str) -> Callable[[F], F]:
    """`nccl_skip_if_lt_x_gpu` with its arguments swapped."""
    return nccl_skip_if_lt_x_gpu(backend, n)


def requires_world_size(n: int) -> Callable[[F], F]:
    """Require `n` ranks, each with an accelerator of its own; a harness reads it with `get_required_world_size`."""
    lacking = devices(n)

    def unmet() -> TestSkip | None:
        if lacking.unmet() is None:
            return None
        message = f"requires {n} accelerators, found {accelerators.most_ranks()}"
        return TestSkip(too_few_devices(n).exit_code, message)

    return requires(Need(unmet, devices=n, world_size=n))


def get_required_world_size(obj: Any, default: int) -> int:
    """Return the number of ranks that `requires_world_size` set on the current test of `obj`, else `default`."""
    current = getattr(obj, "_current_test_name", None)
    name = current() if callable(current) else getattr(obj, "_testMethodName", "")
    test = getattr(obj, name, None)
    return int(getattr(test, "_required_world_size", default))


def _unchanged(func: F) -> F:
    return func


# -- world size


def _world_size_in_environ() -> int:
    return int(os.environ["WORLD_SIZE"])


def _unless_mpi(skip: Callable[[int], bool], name: str) -> Need:
    def unmet() -> TestSkip | None:
        if os.environ.get("BACKEND") == "mpi" or not skip(_world_size_in_environ()):
            return None
        return TEST_SKIPS[name]

    return Need(unmet)


skip_if_small_worldsize = requires(_unless_mpi(lambda size: size < 8, "small_worldsize"))
skip_if_odd_worldsize = requires(_unless_mpi(lambda size: size % 2 == 1, "odd_worldsize"))


# -- backends. These decorate classes as well as functions, so they use unittest's own skip.


def _requires_backend(name: str) -> Callable[[Any], Any]:
    """Skip a test or a class where torch was built without a backend."""
    is_available = getattr(c10d, f"is_{name}_available")
    available = bool(is_available())
    skip = unittest.skipUnless(available, f"c10d was not compiled with the {name.upper()} backend")

    def unmet() -> TestSkip | None:
        return None if available else TEST_SKIPS["backend_unavailable"]

    def decorate(thing: Any) -> Any:
        need = Need(unmet, backend=name)
        all_needs = (need, *needs_of(thing))
        setattr(thing, ATTRIBUTE, all_needs)
        return skip(thing)

    return decorate


requires_gloo = functools.partial(_requires_backend, "gloo")
requires_nccl = functools.partial(_requires_backend, "nccl")
requires_ucc = functools.partial(_requires_backend, "ucc")
requires_mpi = functools.partial(_requires_backend, "mpi")
requires_xccl = functools.partial(_requires_backend, "xccl")


def requires_nccl_version(version: tuple[int, ...], msg: str) -> Callable[[Any], Any]:
    """Skip where NCCL is older. Does nothing on a machine without CUDA: other decorators skip there."""
    if accelerators.accelerator_type() != "cuda":
        return _unchanged
    if not c10d.is_nccl_available():
        return requires_nccl()
    # Untyped in torch.
    nccl: Any = torch.cuda.nccl
    installed = nccl.version()
    return unittest.skipIf(installed < version, f"Requires NCCL {version} or newer, found {installed}: {msg}")


def requires_nccl_shrink() -> Callable[[Any], Any]:
    return requires_nccl_version((2, 27), "older ones cannot shrink groups")


def requires_accelerator_dist_backend(backends: Iterable[str] | None = None) -> Callable[[Any], Any]:
    """Skip where torch has none of these backends (default: those for accelerators)."""
    wanted = list(ACCELERATOR_DIST_BACKENDS if backends is None else backends)
    available = any(_has_accelerator_backend(name) for name in wanted) or (backends is None and _has_own_backend())
    return unittest.skipUnless(available, f"No accelerator communication backend available among {wanted}")


def _has_own_backend() -> bool:
    """Whether an extension has a backend for its accelerators."""
    kind = accelerators.accelerator_type()
    return kind not in (None, "cuda", "xpu", "hpu") and kind in c10d.Backend.default_device_backend_map


def _has_accelerator_backend(name: str) -> bool:
    if name in NCCL:
        return bool(c10d.is_backend_available(name))
    if name == "xccl":
        return bool(c10d.is_xccl_available())
    return name == "hccl" and accelerators.accelerator_type() == "hpu"


# -- platforms and imports


def skip_if_win32() -> Callable[[Any], Any]:
    return unittest.skipIf(sys.platform == "win32", "This test does not run on Windows")


def skip_if_rocm(func: F) -> F:
    skip = unittest.skipIf(torch.version.hip is not None, TEST_SKIPS["skipIfRocm"].message)
    return skip(func)


skip_if_rocm_multiprocess = skip_if_rocm


def import_transformers_or_skip() -> Callable[[F], F]:
    def unmet() -> TestSkip | None:
        return None if find_spec("transformers") else TEST_SKIPS["importerror"]

    return requires(Need(unmet))
