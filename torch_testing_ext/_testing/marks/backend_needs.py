"""Needs of a backend. They decorate classes as well as functions, so they use the skip of unittest."""

import functools
import unittest
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as c10d

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.backend_names import NCCL

from .distributed_needs import unchanged
from .needs import ATTRIBUTE, TEST_SKIPS, Need, TestSkip, needs_of

ACCELERATOR_DIST_BACKENDS = ["nccl", "xccl", "hccl"]


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
        return unchanged
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
