"""What a step may not do between backward and the update, on two ranks: it is refused, with the reason."""

from __future__ import annotations

import random

import numpy
import torch
from guarded import Scenario, between, change_at, keep_params, plain_step, play

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase


@torch.no_grad()
def assign_data(own, model, optimizer):
    for p in own.params:
        p.data = p.data * 0.9


def other_optimizer(own, side):
    own.optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1)


def views(own, side):
    own.views = [p.detach() for p in side.model.parameters()]


def counting(own, model, optimizer):
    own.count += 1


def nonlocal_counting(own, model, optimizer):
    own.count_up()


def keep_counter(own, side):
    count = 0

    def count_up():
        nonlocal count
        count += 1

    own.count_up = count_up


def use_iterator(own, model, optimizer):
    next(iter(model.parameters())).grad.mul_(next(own.iterator))


REFUSED = {
    "data_assigned": (assign_data, keep_params, "assigns to the .data"),
    "hook_on_parameter": (
        lambda own, model, optimizer: own.params[0].register_hook(lambda grad: grad * 2),
        keep_params,
        "registers a hook",
    ),
    "frozen_in_step": (
        lambda own, model, optimizer: own.params[0].requires_grad_(False),
        keep_params,
        "requires_grad=False",
    ),
    "other_optimizer": (
        lambda own, model, optimizer: own.optimizer.step(),
        other_optimizer,
        "not among its arguments",
    ),
    "views": (lambda own, model, optimizer: own.views[0].mul_(0.9), views, "shares the memory"),
    "rebound_list": (
        lambda own, model, optimizer: own.means.__setitem__(0, own.means[0] * 0.9),
        keep_params,
        "The step sets .*means",
    ),
    "counter": (counting, lambda own, side: setattr(own, "count", 0), "The step sets .*count"),
    "nonlocal": (nonlocal_counting, keep_counter, "The step sets .*count"),
    "other_memory": (
        lambda own, model, optimizer: own.params[0].detach().set_(torch.ones(8, 10)),
        keep_params,
        "other memory",
    ),
    "appended": (
        lambda own, model, optimizer: own.seen.append(1),
        lambda own, side: setattr(own, "seen", []),
        "The step sets .*seen",
    ),
    "random": (
        lambda own, model, optimizer: model.parameters() and random.random(),
        lambda own, side: None,
        "Python's random",
    ),
    "numpy_random": (lambda own, model, optimizer: numpy.random.rand(), lambda own, side: None, "numpy.random"),
    "own_generator": (
        lambda own, model, optimizer: own.generator.random(),
        lambda own, side: setattr(own, "generator", numpy.random.default_rng(0)),
        "draws random numbers from .*generator",
    ),
    "iterator": (use_iterator, lambda own, side: setattr(own, "iterator", iter([1.0, 2.0] * 9)), "reads an iterator"),
}


class TestRefusedActs(DTensorContinuousTestBase):
    @property
    def world_size(self):
        return 2

    @parametrize("name", list(REFUSED))
    def test_refused(self, name):
        act, setup, text = REFUSED[name]
        play(self, Scenario(between(act, setup), refused=text), "replicate")

    def test_hook_on_parameter_between_calls(self):
        def register(side):
            side.model[0].weight.register_hook(lambda grad: grad * 2)

        scenario = Scenario(
            lambda side: plain_step, change_at(2, register), refused="has a gradient hook", refused_at=2
        )
        play(self, scenario, "replicate")


instantiate_parametrized_tests(TestRefusedActs)

if __name__ == "__main__":
    run_tests()
