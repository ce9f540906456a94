"""The same training under every layout: a trainer with its own loop, and an optimizer that steps copies of weights.

Run it: pytest examples/cookbook/test_layouts.py
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    return drawn[:, :8], drawn[:, 8:]


class Trainer:
    """In the way of torchtitan: it makes its mesh, cuts its model, and has a loader and a loop."""

    def __init__(self, dp, tp):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.mesh = dist.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        self.model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))
        if tp > 1:
            parallelize_module(self.model, self.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if dp > 1:
            fully_shard(self.model, mesh=self.mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self, steps=2):
        dp = self.mesh["dp"]
        for step in range(steps):
            x, y = (each.chunk(dp.size())[dp.get_local_rank()] for each in batch_of(step))
            (self.model(x) - y).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.layouts("dp=2", "tp=2", "dp=2 tp=2")
def test_trainer(layout):
    trainer = Trainer(layout.size("dp"), layout.size("tp"))
    layout.attach(trainer.model, mesh=trainer.mesh)
    trainer.train()


class MainGradOptimizer:
    """In the way of Megatron: gradients are added up in `main_grad`, and copies of the weights are stepped."""

    def __init__(self, model, group):
        self.group, self.parameters = group, list(model.parameters())
        self.copies = [parameter.detach().clone() for parameter in self.parameters]
        self.inner = torch.optim.AdamW(self.copies)
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(self.add)

    def add(self, parameter):
        parameter.main_grad += parameter.grad
        parameter.grad = None

    def reduce(self):
        for parameter in self.parameters if self.group.size() > 1 else ():
            dist.all_reduce(parameter.main_grad, group=self.group)
            parameter.main_grad /= self.group.size()

    def step(self):
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = parameter.main_grad.clone()
        self.inner.step()
        with torch.no_grad():
            for parameter, copy in zip(self.parameters, self.copies, strict=True):
                parameter.copy_(copy)
                parameter.main_grad.zero_()


@pytest.mark.layouts("dp=2", "dp=4")
def test_main_grad(layout):
    model = layout.load(nn.Sequential(nn.Linear(8, 4), nn.SiLU(), nn.Linear(4, 1)))
    optimizer = MainGradOptimizer(model, layout.group("dp"))
    layout.watch(model, optimizer)
    for x, y in layout.batches(batch_of, steps=2):
        (model(x) - y).square().mean().backward()
        optimizer.reduce()
        optimizer.step()
