"""Checks of the machine for tests of collectives: multicast, symmetric memory, ROCm versions, EFA."""

import functools
import resource
import shutil
import subprocess
import unittest
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.lazy_values import LazyVal

from . import skips_by_architecture
from .parametrized import Decorator as Decorator

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
    """Whether the devices of this machine support symmetric memory."""
    if accelerators.accelerator_type() != "cuda":
        return False
    return not _on_rocm() or any(arch in skips_by_architecture.getRocmArchName() for arch in _ROCM_WITH_SYMM_MEM)


PLATFORM_SUPPORTS_SYMM_MEM = LazyVal(evaluate_platform_supports_symm_mem)


def skip_if_rocm_arch_multiprocess(arch: tuple[str, ...]) -> Decorator:
    """Skip on ROCm devices of these architectures."""
    is_one = _on_rocm() and skips_by_architecture.isRocmArchAnyOf(arch)
    return unittest.skipIf(is_one, f"does not run on ROCm's {', '.join(arch)}")


def skip_if_rocm_ver_lessthan_multiprocess(version: Sequence[int] | None = None) -> Decorator:
    """Skip on an older ROCm; without a version, on every ROCm."""
    older = _on_rocm() and (version is None or skips_by_architecture.getRocmVersion() < tuple(version))
    return unittest.skipIf(older, f"needs ROCm {version} or newer")


def skip_if_rocm_ver_atleast_multiprocess(version: Sequence[int] | None = None) -> Decorator:
    """Skip on this version of ROCm and newer ones."""
    newer = _on_rocm() and version is not None and skips_by_architecture.getRocmVersion() >= tuple(version)
    return unittest.skipIf(newer, f"does not run on ROCm {version} and newer")


def sm_is_or_higher_than(device: torch.device, major: int, minor: int) -> bool:
    """Whether a CUDA device has this compute capability. False for ROCm, true for devices of other types."""
    if device.type != "cuda":
        return True
    capabilities = accelerators.cuda_properties()["capabilities"]
    return not _on_rocm() and tuple(capabilities[device.index or 0]) >= (major, minor)


@functools.cache
def has_efa() -> bool:
    """Whether the machine has AWS Elastic Fabric Adapters and the libfabric provider for them."""
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
