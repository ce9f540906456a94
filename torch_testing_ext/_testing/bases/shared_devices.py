"""Accelerators that ranks share, as the user has asked: the device, the backend and the memory of each.

All of this happens when a rank first uses CUDA: a test on the CPU never touches a device. The rules are in
`_machine/device_sharing.py`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._machine import accelerators, device_sharing
from torch_testing_ext._machine.backend_names import uses_nccl
from torch_testing_ext._testing.marks.needs import TEST_SKIPS, Skipped, TestSkip
from torch_testing_ext._torch.devices import cuda_state
from torch_testing_ext.launch.device_leases import are_shared


def backend_of_shared_devices() -> str:
    return device_sharing.shared_backend(cuda_state.nccl_version(), torch.version.hip is not None)


def backend_of(kind: str, world_size: int) -> str:
    """Return the default backend for devices of this kind, also if the ranks share them."""
    if kind == "cuda" and are_shared(world_size):
        return backend_of_shared_devices()
    return str(dist.get_default_backend_for_device(kind))


def check_backend(name: str, world_size: int) -> None:
    """Skip a test that names NCCL itself, where its ranks share devices and NCCL does not allow that."""
    if uses_nccl(name) and are_shared(world_size) and backend_of_shared_devices() != "nccl":
        version = ".".join(map(str, cuda_state.nccl_version())) or "of this torch"
        why = f"NCCL {version} does not let {world_size} ranks share {accelerators.device_count()} GPU(s)"
        raise Skipped(TestSkip(TEST_SKIPS["generic"].exit_code, why))


def prepare_shared_devices(rank: int, world_size: int) -> None:
    """In a new rank: prepare for devices that it shares with other ranks."""
    kind = accelerators.accelerator_type()
    if kind is None or kind == "xpu" or not are_shared(world_size):
        return
    devices = accelerators.device_count()
    cuda_state.fold_device_numbers(devices, kind)
    if kind != "cuda":
        # Its own backend has to let ranks share, and its allocator their memory.
        return
    ranks = device_sharing.ranks_on_device(rank, world_size, devices)
    chosen = backend_of_shared_devices()
    if chosen == "nccl":
        os.environ[device_sharing.NCCL_SHARES] = "1"
        # NCCL refuses such ranks if it must use NVLS.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        os.environ.setdefault("NCCL_MAX_CTAS", str(device_sharing.blocks_for(ranks)))
    else:
        names: Any = dist.Backend.default_device_backend_map
        # The backend of groups that leave it to torch.
        names["cuda"] = chosen
        cuda_state.gather_lists_one_by_one()
    own = device_sharing.device_of(rank, devices)

    def at_first_use() -> None:
        torch.cuda.set_device(own)
        total = torch.cuda.get_device_properties(own).total_memory
        torch.cuda.set_per_process_memory_fraction(device_sharing.fraction_for(total, ranks), own)

    cuda_state.when_cuda_is_first_used(at_first_use)
