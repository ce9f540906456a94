"""Faults of devices, one in each test, in the line with the comment "fault": run with --fake-accelerators 4.

Ranks come first: a process that has used a device cannot fork ranks that use one.
"""

import ctypes

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KIND = "fakeacc"
in_two_ranks = pytest.mark.world_size(2)


@in_two_ranks
def test_tensor_of_the_cpu_in_a_collective(dist_env):
    loss = torch.zeros(1)
    dist.all_reduce(loss)  # fault


@in_two_ranks
def test_one_of_a_list_is_on_the_cpu(dist_env):
    parts = [torch.zeros(1, device=dist_env.device), torch.zeros(1)]
    dist.all_gather(parts, torch.ones(1, device=dist_env.device))  # fault


@in_two_ranks
def test_the_index_of_the_rank_is_ignored(dist_env):
    model = nn.Linear(2, 2).to(dist_env.device)
    batch = torch.ones(2, 2, device=f"{KIND}:0")
    assert dist_env.rank == 0 or model(batch) is not None  # fault


@in_two_ranks
def test_ddp_of_a_model_on_another_device(dist_env):
    other = (dist_env.rank + 1) % 2
    model = DistributedDataParallel(nn.Linear(2, 2).to(dist_env.device), device_ids=[other])
    model(torch.ones(2, 2, device=dist_env.device))  # fault


@in_two_ranks
def test_the_host_reads_memory_of_a_device(dist_env):
    ctypes.string_at(torch.ones(2, device=dist_env.device).data_ptr(), 4)  # fault


def test_cuda_is_hard_coded():
    nn.Linear(2, 2).cuda()  # fault


def test_a_buffer_is_left_behind():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(2)

        def forward(self, x):
            return torch.cat([x, self.scale])  # fault

    Scaled().to(KIND)(torch.ones(2, device=KIND))


def test_a_checkpoint_is_loaded_to_another_device(tmp_path):
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "x.pt")
    weight = torch.load(tmp_path / "x.pt")["weight"]
    torch.ones(2, 2, device=KIND) @ weight  # fault


def test_pinned_memory_is_assumed():
    batch = torch.ones(2).to(KIND).cpu()
    assert batch.is_pinned()  # fault


def test_the_input_is_not_moved():
    nn.Linear(2, 2).to(KIND)(torch.ones(2, 2))  # fault


def test_targets_are_not_moved():
    logits = torch.zeros(2, 3, device=KIND)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1]))  # fault


def test_numpy_of_a_device():
    torch.ones(2, device=KIND).numpy()  # fault


def test_a_generator_of_the_cpu():
    torch.randn(2, device=KIND, generator=torch.Generator())  # fault


def test_more_devices_than_there_are():
    torch.ones(2, device=f"{KIND}:4")  # fault


def test_memory_is_leaked():
    leaked = [torch.ones(1000, device=KIND) for _ in range(3)]
    assert torch.accelerator.memory_allocated() == 0, len(leaked)  # fault
