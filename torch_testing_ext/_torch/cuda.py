"""CUDA: its allocator and the workspaces of its libraries."""

from __future__ import annotations

import torch


def caching_allocator_is_enabled() -> bool:
    """Does CUDA's allocator cache memory? `_cuda_cudaCachingAllocator_is_enabled`: 2.13 to 2.15."""
    ask = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    return True if ask is None else bool(ask())


def forget_blas_workspaces() -> None:
    """Free the workspaces of cuBLAS, and give them their default size. `_cuda_clearCublasWorkspaces`: 2.11 to 2.15.

    `_cuda_resetCublasWorkspaceSize`, `_cuda_resetCublasLtWorkspaceSize`: 2.13 to 2.15.
    """
    for name in ("_cuda_resetCublasWorkspaceSize", "_cuda_resetCublasLtWorkspaceSize", "_cuda_clearCublasWorkspaces"):
        if (call := getattr(torch._C, name, None)) is not None:
            call()
