"""Whether a gradient exists when a step begins is a fact that programs depend on: against DDP on two ranks."""

from __future__ import annotations

import torch
from guarded import Scenario, play

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

STYLES = parametrize("style", ["replicate", "fully_shard"])


def training(clear=None, factor=lambda model: 1):
    """A step that multiplies its loss by `factor(model)`, which it asks before it clears the gradients."""

    def make(side):
        def step(model, optimizer, batch):
            scale = factor(model)
            if clear is not None:
                clear(model, optimizer)
            loss = (model(batch[0]) - batch[1]).pow(2).mean() * scale
            loss.backward()
            optimizer.step()
            return loss

        return step

    return make


def zero_by_hand(model, optimizer):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


def freeze_second(i, side):
    side.model[0].requires_grad_(i < 2)


def give_to_frozen(i, side):
    side.model[0].requires_grad_(False)
    for param in side.model[0].parameters():
        param.grad = torch.ones_like(param)


def remove_outside(i, side):
    if i in (1, 3):
        side.model[2].weight.grad = None


def count(model):
    return 1 + sum(param.grad is not None for param in model.parameters())


def is_first(model):
    return 3 if next(model.parameters()).grad is None else 1


def has_gradient_by_name(model):
    return 3 if getattr(next(model.parameters()), "grad", None) is None else 1


def norm_of_old(model):
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return 1 + torch.stack([grad.norm() for grad in grads]).sum() if grads else 1


@instantiate_parametrized_tests
class TestGradientsOnEntry(DTensorContinuousTestBase):
    world_size = 2

    def play(self, style, step, **others):
        return play(self, Scenario(step, tolerance=1e-5, **others), style)

    @STYLES
    @parametrize("factor", [count, is_first, has_gradient_by_name, norm_of_old])
    def test_looking_at_gradients_before_they_are_cleared(self, style, factor):
        self.play(style, training(clear=lambda model, optimizer: optimizer.zero_grad(), factor=factor))

    @STYLES
    def test_looking_at_gradients_that_accumulate(self, style):
        self.play(style, training(factor=count))

    @STYLES
    def test_looking_at_gradients_that_are_removed_outside(self, style):
        self.play(style, training(factor=count), change=remove_outside)

    @STYLES
    def test_zeroing_by_hand(self, style):
        self.play(style, training(clear=zero_by_hand))

    @STYLES
    @parametrize("change", [freeze_second, give_to_frozen])
    @parametrize("clears", [True, False])
    def test_gradient_of_a_frozen_parameter(self, style, change, clears):
        clear = (lambda model, optimizer: optimizer.zero_grad()) if clears else None
        self.play(style, training(clear=clear), change=change, wraps_each_call=True)

    @STYLES
    def test_clearing_of_gradients_needs_no_new_trace(self, style):
        make = training(clear=lambda model, optimizer: optimizer.zero_grad())
        compiled = self.play(style, make, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), sizes=(4,))
        self.assertEqual(compiled.traces, 1)


if __name__ == "__main__":
    run_tests()
