"""Tensors that a step captures from outside: averages, buffers of its own, teachers. Against DDP on two ranks."""

from __future__ import annotations

import torch
from guarded import Scenario, play

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

STYLES = parametrize("style", ["replicate", "fully_shard"])


def capturing(act, make=lambda model: torch.ones(8)):
    """A step that calls `act(own, model, x)` after its update, and returns the loss and what `act` returns."""

    def of_side(side):
        side.own.tensor = make(side.model)
        side.own.view = side.own.tensor[:4] if isinstance(side.own.tensor, torch.Tensor) else None

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            loss = (model(batch[0]) - batch[1]).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss, act(side.own, model, batch[0])

        return step

    return of_side


def zeros_like_parameters(model):
    return [torch.zeros_like(param) for param in model.parameters()]


def count(own, model, x):
    own.tensor.mul_(0.5).add_(1)
    return own.tensor * 1


@torch.no_grad()
def average(own, model, x):
    for mean, param in zip(own.tensor, model.parameters(), strict=True):
        mean.mul_(0.9).add_(param, alpha=0.1)
    return [mean.clone() for mean in own.tensor]


@torch.no_grad()
def through_view(own, model, x):
    own.view.add_(next(iter(model.parameters()))[0, :4])
    return own.tensor * 2


def read_as_number(own, model, x):
    return x * (own.tensor[0] * 2).item()


USES = {
    "count": (count, lambda model: torch.ones(8)),
    "average": (average, zeros_like_parameters),
    "view": (through_view, lambda model: torch.ones(8)),
    "number": (read_as_number, lambda model: torch.ones(8)),
}


@torch.no_grad()
def diverge(own, model, x):
    own.tensor.copy_(x.mean(0)[:8])
    list(model.parameters())[1].add_(own.tensor)


@torch.no_grad()
def diverge_through_view(own, model, x):
    own.view.copy_(x.mean(0)[:4])
    list(model.parameters())[1].add_(own.tensor)


@torch.no_grad()
def add_to_bias(own, model, x):
    list(model.parameters())[1].add_(own.tensor)


@torch.no_grad()
def add_constant_to_bias(own, model, x):
    list(model.parameters())[1].add_(torch.tensor(own.number))


class TestCaptured(DTensorContinuousTestBase):
    """Steps that read and write captured tensors."""

    @property
    def world_size(self):
        return 2

    @STYLES
    @parametrize("name", list(USES))
    def test_right(self, name, style):
        act, make = USES[name]

        def change(i, side):
            if i and isinstance(side.own.tensor, torch.Tensor):
                side.own.tensor.add_(1)

        play(self, Scenario(capturing(act, lambda model: _on(self, make(model))), change), style)

    @STYLES
    @parametrize("act", [diverge, diverge_through_view])
    def test_values_of_the_batch_that_reach_a_parameter(self, act, style):
        scenario = Scenario(capturing(act, lambda model: _on(self, torch.ones(8))), refused="differ between ranks")
        play(self, scenario, style)

    @STYLES
    def test_values_that_differ_between_ranks(self, style):
        scenario = Scenario(
            capturing(add_to_bias, lambda model: _of_rank(self, 8)),
            refused="differ in their values of captured tensors",
        )
        play(self, scenario, style)

    @STYLES
    def test_constants_that_differ_between_ranks(self, style):
        def set_number(i, side):
            side.own.number = self.rank + 1.0

        play(self, Scenario(capturing(add_constant_to_bias), set_number, refused="differ in their updates"), style)


def _of_rank(test, size):
    return torch.full((size,), test.rank + 1.0, device=test.device_type)


def _on(test, made):
    return torch.utils._pytree.tree_map(lambda tensor: tensor.to(test.device_type), made)


instantiate_parametrized_tests(TestCaptured)

if __name__ == "__main__":
    run_tests()
