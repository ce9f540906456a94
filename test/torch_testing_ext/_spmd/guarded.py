"""The comparison that tests of guards share: a step, compiled and under DDP, with changes between calls."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from spmd_training import Case, capture, compare, compare_models, normal_batch, to_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_testing_ext.distributed._spmd import DataParallel, SPMDError


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4))


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@dataclass
class Side:
    """One of the two trainings: its plain model, its optimizer, and a place for objects of the test's own."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    own: types.SimpleNamespace = field(default_factory=types.SimpleNamespace)


@dataclass
class Scenario:
    """A step, and the changes between its calls.

    step: makes the step of one side, so that each side captures objects of its own.
    change: called for both sides before each call, with the call's number.
    arguments: the arguments of one call, from the called model, the side and the batch.
    wraps_each_call: whether DDP wraps the model again before each call; otherwise it does not notice frozen layers.
    refused: a part of the error's text, if the compiled step must refuse call number `refused_at`.
    """

    step: Callable[[Side], Callable[..., Any]]
    change: Callable[[int, Side], None] = lambda i, side: None
    arguments: Callable[[Any, Side, Any], tuple[Any, ...]] = lambda model, side, batch: (model, side.optimizer, batch)
    model: Callable[[], nn.Module] = small
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum
    sizes: tuple[int, ...] = (4, 5, 6, 4)
    calls: int = 4
    wraps_each_call: bool = False
    refused: str | None = None
    refused_at: int = 0
    tolerance: float = 1e-6


def play(test: Any, scenario: Scenario, style: str, verify: Any = "first") -> Any:
    """Run `scenario` compiled and under DDP, and compare results, models and gradients after each call."""
    torch.manual_seed(test.rank)
    mine = scenario.model().to(test.device_type)
    reference = copy.deepcopy(mine)
    devices = None if test.device_type == "cpu" else [test.rank]
    sides = [Side(model, scenario.optimizer(model.parameters())) for model in (mine, reference)]
    steps = [scenario.step(side) for side in sides]
    wrapped = DistributedDataParallel(reference, device_ids=devices)
    compiled = capture(parallel_mode=DataParallel(style), verify=verify)(steps[0])  # type: ignore[arg-type]
    case = Case(style, scenario.model, normal_batch(6, 10), tolerance=scenario.tolerance)
    for i in range(scenario.calls):
        for side in sides:
            scenario.change(i, side)
        size = scenario.sizes[i % len(scenario.sizes)] + test.rank * (i % 2)
        batches = [to_device(normal_batch(size, 10)(test.rank, i), test.device_type) for _ in sides]
        if scenario.refused is not None and i == scenario.refused_at:
            with test.assertRaisesRegex(SPMDError, scenario.refused):
                compiled(*scenario.arguments(mine, sides[0], batches[0]))
            return compiled
        found = compiled(*scenario.arguments(mine, sides[0], batches[0]))
        if scenario.wraps_each_call:
            wrapped = DistributedDataParallel(reference, device_ids=devices)
        expected = steps[1](*scenario.arguments(wrapped, sides[1], batches[1]))
        compare(test, case, i, "result", found, expected)
        compare_models(test, case, i, mine, reference)
    return compiled


def plain_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def between(act, setup=lambda own, side: None):
    """A step that calls `act(own, model, optimizer)` between backward and the update. `setup` runs before DDP wraps."""

    def make(side):
        setup(side.own, side)

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            loss = (model(batch[0]) - batch[1]).pow(2).mean()
            loss.backward()
            act(side.own, model, optimizer)
            optimizer.step()
            return loss

        return step

    return make


def change_at(call, act):
    return lambda i, side: act(side) if i == call else None


def keep_params(own, side):
    own.params = list(side.model.parameters())
    own.some = set(side.model[0].parameters())
    own.factors = {p: 0.1 * i for i, p in enumerate(own.params)}
    own.ids = {id(p) for p in side.model[2].parameters()}
    first = own.first = side.model[0].weight
    own.pair, own.frozen = (first, (first, 0)), frozenset([first])
    own.first_id, own.id_tuple = id(first), (id(first),)
    own.halve_first = lambda p: p is first
    own.halve_default = lambda p, q=first: p is q
    own.means = [torch.zeros_like(p) for p in own.params]
