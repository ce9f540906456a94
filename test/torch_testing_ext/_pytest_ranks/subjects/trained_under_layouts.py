"""A training that is right over dp and wrong over ep, and counts how often one rank trains."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn


def make(step):
    torch.manual_seed(step)
    return torch.randn(4, 3), torch.randn(4, 1)


@pytest.mark.layouts("dp=2", "ep=2", "dp=4")
def test_it(layout):
    if repr(layout) == "single":
        with open(os.environ["COUNT"], "a") as file:
            file.write("x")
    model = layout.load(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in layout.batches(make, steps=2):
        loss = (model(x) - y).square().sum() / 4
        loss.backward()
        if layout.size("dp") > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=layout.group("dp"))
        layout.step(model, optimizer, loss.detach())
