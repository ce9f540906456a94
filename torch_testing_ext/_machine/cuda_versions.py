"""The versions of CUDA, ROCm and MAGMA that torch was built with."""

import torch

Version = tuple[int, ...]


def cuda_version() -> Version:
    """Return the version of CUDA that torch was built with; (0, 0) without CUDA."""
    return _numbers(torch.version.cuda or "0.0")


def rocm_version() -> Version:
    """Return the release of ROCm, all its numbers; (0, 0) without ROCm."""
    # HIP's version is that of ROCm, except in previews. Before torch 2.15, it is the only one that torch records.
    return _numbers(getattr(torch.version, "rocm", None) or torch.version.hip or "0.0")


def magma_version() -> Version:
    """Return the version of MAGMA that torch was built with; (0, 0) without MAGMA."""
    _, _, after = torch.__config__.show().partition("Magma ")
    if not after:
        return 0, 0
    version, *_ = after.splitlines()
    return _numbers(version)


def _numbers(version: str) -> Version:
    release, _, _ = version.partition("-")
    return tuple(int(part) for part in release.split("."))
