"""Exact types of tensors in a step, and buffers that differ between ranks: against DDP on two ranks."""

from __future__ import annotations

import torch
from guarded import Scenario, play
from torch import nn

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

STYLES = parametrize("style", ["replicate", "fully_shard"])


def kinds(tensors):
    return [2 if type(each) is torch.Tensor else 3 if type(each) in (nn.Parameter,) else 5 for each in tensors]


class Shifted(nn.Module):
    """A model with buffers that no step writes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(8))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x)) + self.shift)) * self.scale


def by_type(side):
    def step(model, optimizer, batch):
        x, y = batch
        made = type("Made", (), {"factor": 2})
        factor = sum(kinds([x, *model.parameters()])) + isinstance(int, type) + made.factor + (type(made) is type)
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean() * factor
        loss.backward()
        optimizer.step()
        return loss

    return step


def plain(side):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = (model(batch[0]) - batch[1]).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@instantiate_parametrized_tests
class TestTypesSeen(DTensorContinuousTestBase):
    world_size = 2

    @STYLES
    def test_exact_types(self, style):
        play(self, Scenario(by_type, tolerance=1e-5), style)
        self.assertNotIn("type", globals())  # what the trace put there is gone

    @STYLES
    @parametrize("name", ["shift", "scale", "norm.running_mean"])
    def test_buffers_that_ranks_change_on_their_own(self, style, name):
        def change(i, side):
            if i == 2:
                side.model.norm.eval()
                side.model.get_buffer(name).add_(self.rank + 1)

        play(self, Scenario(plain, change=change, model=Shifted, tolerance=1e-5), style)


if __name__ == "__main__":
    run_tests()
