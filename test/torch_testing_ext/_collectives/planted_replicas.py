"""Replicas that part, planted one by one; the faults belong to `planted_sanitized`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from planted import WORLD_SIZE
from planted_sanitized import BOTH, fault
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def model_of() -> DistributedDataParallel:
    torch.manual_seed(dist.get_rank())
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def train(model, optimizer, steps=4, between=lambda step: None):
    for step in range(1, steps + 1):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)


def parted(when, name):
    return (
        "failed",
        f"rank 1 has diverged from ranks 0, 2 {when}: {name}",
        "DDP in the default group",
        "planted_replicas.py:",
    )


@fault(*parted("between steps 2 and 3", "1.bias [2]"), kinds=("replicas",), bases=BOTH)
def silent_corruption(self):
    """One bit of one number, which no counter of torch sees."""
    model = model_of()

    def flip(step):
        if self.rank == 1 and step == 2:
            model.module[1].bias.data.view(torch.int32)[0] ^= 1 << 12

    train(model, torch.optim.SGD(model.parameters(), lr=0.1), between=flip)


@fault(*parted("in step 3", "0.weight [4, 4] and 3 more tensors"), kinds=("replicas",))
def averaged_twice(self):
    model = model_of()

    def average_again(*_):
        for parameter in model.parameters() if self.rank == 1 else ():
            parameter.grad /= WORLD_SIZE

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    optimizer.register_step_pre_hook(average_again)
    train(model, optimizer, 2)


@fault(
    "failed",
    "ranks 0-2 have diverged from each other before step 1: weight, tensor 1 [4, 4] (SGD in the default group)",
    kinds=("replicas",),
)
def missing_seed_of_a_replicated_dtensor(self):
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("dp",))
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    for seed, model in ((0, first), (self.rank, second)):
        torch.manual_seed(seed)
        model.weight = nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh, [Replicate()], run_check=False))
    torch.optim.SGD([first.weight, second.weight], lr=0.1).step()
