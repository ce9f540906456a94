"""Ranks that share accelerators, as the user has asked: the device, the backend and the memory of each.

All of this happens when a rank first uses CUDA: a test on the CPU never touches a device. See `_machine/sharing.py`.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext import _torch
from torch_testing_ext._machine import accelerators, sharing
from torch_testing_ext._machine.backends import uses_nccl
from torch_testing_ext._marks.needs import TEST_SKIPS, Skipped, TestSkip


def are_shared(world_size: int) -> bool:
    """Do ranks share devices, where there are this many of them? Only if the user lets them."""
    return sharing.ranks_per_device() > 1 and 0 < accelerators.device_count() < world_size


def backend() -> str:
    return sharing.shared_backend(_torch.cuda_state.nccl_version(), torch.version.hip is not None)


def backend_of(kind: str, world_size: int) -> str:
    """Return the default backend for devices of this kind, also if the ranks share them."""
    if kind == "cuda" and are_shared(world_size):
        return backend()
    return str(dist.get_default_backend_for_device(kind))


def check_backend(name: str, world_size: int) -> None:
    """Skip a test that names NCCL itself, where its ranks share devices and NCCL does not allow that."""
    if uses_nccl(name) and are_shared(world_size) and backend() != "nccl":
        version = ".".join(map(str, _torch.cuda_state.nccl_version())) or "of this torch"
        why = f"NCCL {version} does not let {world_size} ranks share {accelerators.device_count()} GPU(s)"
        raise Skipped(TestSkip(TEST_SKIPS["generic"].exit_code, why))


def begin(rank: int, world_size: int) -> None:
    """In a new rank: prepare for devices that it shares with other ranks."""
    if not are_shared(world_size) or accelerators.accelerator_type() != "cuda":
        return
    devices = accelerators.device_count()
    ranks = sharing.ranks_on_device(rank, world_size, devices)
    chosen = backend()
    if chosen == "nccl":
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ.setdefault("NCCL_MAX_CTAS", str(sharing.blocks_for(ranks)))
    else:
        names: Any = dist.Backend.default_device_backend_map
        # For groups whose backend is left to torch.
        names["cuda"] = chosen
        _torch.cuda_state.gather_lists_one_by_one()
    _torch.cuda_state.fold_device_numbers(devices)
    own = sharing.device_of(rank, devices)

    def at_first_use() -> None:
        torch.cuda.set_device(own)
        total = torch.cuda.get_device_properties(own).total_memory
        torch.cuda.set_per_process_memory_fraction(sharing.fraction_for(total, ranks), own)

    _torch.cuda_state.when_cuda_is_first_used(at_first_use)
