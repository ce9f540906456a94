"""Attributes of tensors, settings of groups, results and exceptions of a step: right as under DDP, or refused."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from typing import Any

import torch
from guarded import Scenario, play
from torch import nn

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase


def training(scale=lambda own, optimizer, model, x: 1.0, then=lambda own, model, x: None, grad=None):
    """A step whose loss is scaled, whose gradients are changed, and that does something in the end."""

    def of_side(side):
        def step(model, optimizer, batch):
            optimizer.zero_grad()
            loss = (model(batch[0]) - batch[1]).pow(2).mean() * scale(side.own, optimizer, model, batch[0])
            loss.backward()
            for param in model.parameters():
                if grad is not None:
                    param.grad.mul_(grad(param))
            optimizer.step()
            made = then(side.own, model, batch[0])
            return loss if made is None else made(loss) if callable(made) else made

        return step

    return of_side


def mark(i, side):
    for number, param in enumerate(side.model.parameters()):
        param.lr_scale = 0.1 * (number + 1) * (1 + i // 2)


def mark_later(i, side):
    if i == 2:
        mark(i, side)


def shrink(i, side):
    side.optimizer.param_groups[0].setdefault("scales", [1.0])[0] = 1 / (i + 1)


def replace_tensor(i, side):
    side.optimizer.param_groups[0]["weight"] = torch.tensor([1.0, 2.0]) / (i + 1)


def alternate_type(i, side):
    side.optimizer.param_groups[0]["lr"] = torch.tensor(0.1) if i % 2 else 0.05


def decay(i, side):
    side.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)


def resize_buffer(i, side):
    if i == 2:
        side.model.scale.data = torch.full((5,), 2.0)


def with_buffer():
    model = nn.Sequential(nn.Linear(10, 4))
    model.register_buffer("scale", torch.ones(3))
    return model


def freeze_teacher(i, side):
    if i == 0:
        side.own.teacher = nn.Linear(10, 4).requires_grad_(False)
        with torch.no_grad():
            side.own.teacher.weight.fill_(0.1)
            side.own.teacher.bias.zero_()


def class_seen(own, optimizer, model, x):
    return 1.0 if x.__class__ is torch.Tensor and next(model.parameters()).__class__ is nn.Parameter else 0.5


def buffer_sum(own, optimizer, model, x):
    return getattr(model, "module", model).scale.sum()


@dataclasses.dataclass
class Output:
    """A result with tensors."""

    loss: Any
    size: Any


RIGHT = {
    "attribute_of_parameters": Scenario(training(grad=lambda param: getattr(param, "lr_scale", 1.0)), mark),
    "attribute_that_appears": Scenario(training(grad=lambda param: getattr(param, "lr_scale", 1.0)), mark_later),
    "list_in_a_group": Scenario(training(lambda own, o, m, x: o.param_groups[0]["scales"][0]), shrink),
    "tensor_in_a_group": Scenario(training(lambda own, o, m, x: o.param_groups[0]["weight"].sum()), replace_tensor),
    "learning_rate_of_another_type": Scenario(training(), alternate_type, sizes=(4,)),
    "type_of_a_learning_rate": Scenario(
        training(lambda own, o, m, x: 1.0 if isinstance(o.param_groups[0]["lr"], float) else 0.5), decay
    ),
    "text_of_a_learning_rate": Scenario(training(lambda own, o, m, x: float(f"{o.param_groups[0]['lr']:.2f}")), decay),
    "class_of_tensors": Scenario(training(class_seen)),
    "shape_of_a_buffer": Scenario(training(buffer_sum), resize_buffer, model=with_buffer, sizes=(4,)),
    "dataclass_as_result": Scenario(training(then=lambda own, m, x: lambda loss: vars(Output(loss, len(x))))),
    "namespace_as_result": Scenario(training(then=lambda own, m, x: lambda loss: types.SimpleNamespace(a=x.shape))),
    "frozen_model_that_is_captured": Scenario(
        training(lambda own, o, m, x: own.teacher(x).pow(2).mean()), freeze_teacher
    ),
}


class Special(nn.Parameter):
    """A parameter that code recognizes by its class."""


def with_special():
    model = nn.Sequential(nn.Linear(10, 4))
    model[0].weight = Special(model[0].weight.detach())
    return model


def counting(side):
    class Counter:
        calls = 0

    def step(model, optimizer, batch):
        Counter.calls += 1
        return training()(side)(model, optimizer, batch)

    return step


def fail(loss):
    raise KeyError("stop")


def read_value(loss):
    try:
        return loss if loss > 0 else None
    except Exception:
        return None


def turn(i, side):
    side.own.tensor = torch.ones(2, 3)


def tagged(model, side, batch):
    batch[0].scale = 0.5
    return model, side.optimizer, batch


def of_subclass(model, side, batch):
    return model, side.optimizer, tuple(tensor.as_subclass(Image) for tensor in batch)


class Image(torch.Tensor):
    """A tensor that code recognizes by its class."""


def set_attribute(own, model, x):
    next(model.parameters()).seen = True


def require_gradient(own, model, x):
    x.requires_grad_()


REFUSED = {
    "class_attribute": Scenario(counting, refused="sets Counter.calls"),
    "attribute_set": Scenario(training(then=set_attribute), refused="sets the attribute seen"),
    "attribute_of_an_input": Scenario(
        training(lambda own, o, m, x: getattr(x, "scale", 3.0)), arguments=tagged, refused="attribute scale of an input"
    ),
    "subclass_of_a_parameter": Scenario(training(), model=with_special, refused="of the class Special"),
    "subclass_as_input": Scenario(training(), arguments=of_subclass, refused="subclass of torch.Tensor"),
    "exception_after_the_update": Scenario(training(then=lambda own, m, x: fail), refused="KeyError: 'stop'"),
    "value_in_a_try": Scenario(training(then=lambda own, m, x: read_value), refused="branches on the value"),
    "input_that_requires_grad": Scenario(
        training(then=require_gradient), refused="require a gradient, and leaves it so"
    ),
    "transposed_captured_tensor": Scenario(
        training(then=lambda own, m, x: own.tensor.t_()), turn, refused="changes the shape"
    ),
    "version": Scenario(training(lambda own, o, m, x: 1.0 + x._version), refused="_version"),
}


def made_at_import(how):
    """An object whose code reads a variable of this function, and a function that changes the variable.

    Ranks exempt what was imported before they were forked from garbage collection, and from searches for referrers.
    """
    scale = 1.0

    class Made:
        own = how(lambda *others: scale)

    def change(value):
        nonlocal scale
        scale = value

    return Made, change


MADE = {
    "property": (made_at_import(property), lambda made: made().own),
    "static_method": (made_at_import(staticmethod), lambda made: made.own()),
    "class_method": (made_at_import(classmethod), lambda made: made.own()),
    "cached_property": (made_at_import(functools.cached_property), lambda made: made().own),
    "default_of_a_dict": (made_at_import(lambda of: collections.defaultdict(of)), lambda made: made.own.copy()["a"]),
    "method_of_map": (made_at_import(lambda of: types.MethodType(map, of)), lambda made: next(made.own([1]))),
}


class TestAttributes(DTensorContinuousTestBase):
    """What Python code sees of tensors, and what it does besides computing with them."""

    @property
    def world_size(self):
        return 2

    @parametrize("name", list(RIGHT))
    def test_right(self, name):
        play(self, dataclasses.replace(RIGHT[name], calls=3), "fully_shard", verify="off")

    @parametrize("name", list(REFUSED))
    def test_refused(self, name):
        play(self, REFUSED[name], "fully_shard", verify="off")

    @parametrize("name", list(MADE))
    def test_variables_of_functions_that_were_made_at_import(self, name):
        (made, change), read = MADE[name]
        step = training(lambda own, optimizer, model, x: read(made))
        scenario = Scenario(step, lambda i, side: change(3.0 if i == 2 else 1.0))
        play(self, scenario, "replicate", verify="off")

    def test_anomaly_detection(self):
        scenario = Scenario(training(), lambda i, side: torch.autograd.set_detect_anomaly(True), refused="Anomaly")
        try:
            play(self, scenario, "replicate", verify="off")
        finally:
            torch.autograd.set_detect_anomaly(False)


instantiate_parametrized_tests(TestAttributes)

if __name__ == "__main__":
    run_tests()
