"""What a trace reads from Python is an input, a guard or a refusal: changes between calls, against DDP on two ranks."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import types

import numpy
import torch
from guarded import Scenario, between, change_at, keep_params, plain_step, play, small
from spmd_training import capture
from torch import nn

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

FACTOR = 1.0
HELPERS = types.SimpleNamespace(scale=lambda loss: loss * 2)


def scaled_by(factor_of):
    """A step whose loss is multiplied by a number that it reads when it runs."""

    def make(side):
        def step(model, optimizer, batch):
            optimizer.zero_grad()
            loss = (model(batch[0]) - batch[1]).pow(2).mean() * factor_of(side.own)
            loss.backward()
            optimizer.step()
            return loss

        return step

    return make


class Shown:
    """An object whose attribute is one of its class, until it gets its own."""

    factor = 1.0

    def __call__(self):
        return self.factor


class Settings(nn.Module):
    """A model that reads attributes of every kind."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.0)
        self.scale, self.options, self.powers = 1.0, {"shift": 0.0}, [1, 1]
        self.config = types.SimpleNamespace(gain=1.0)
        self.name = "plain"
        self.named_gain = 1.0
        self.mask = None
        self.register_buffer("bias", None)
        self.unread = 0
        self.shown, self.user_dict, self.numbers = Shown(), collections.UserDict(factor=1.0), bytearray([1])

    def forward(self, x):
        x = self.drop(torch.tanh(self.first(x))) * self.scale * self.config.gain * getattr(self, "named" + "_gain")
        x = self.second(x) + self.options["shift"]
        x = x * self.shown() * self.user_dict["factor"] * self.numbers[0]
        x = x if self.mask is None else x * self.mask
        x = x if self.bias is None else x + self.bias
        return x.pow(2).pow(self.powers[0]) if self.name == "other" else x * self.powers[1]


class Rebinding(nn.Module):
    """A model that replaces a buffer in forward instead of writing to it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 4)
        self.register_buffer("average", torch.randn(4))

    def forward(self, x):
        out = self.layer(x)
        self.average = self.average * 0.9 + out.detach().mean(0) * 0.1
        return out - self.average


def dropping(side):
    side.model.drop.p = 1.0


def hook(side):
    side.model.first.register_forward_hook(lambda module, args, out: out * 2)


def set_global(i, side):
    global FACTOR
    FACTOR = 1.0 + i // 2


def helper(i, side):
    HELPERS.scale = (lambda loss: loss * 3) if i >= 2 else (lambda loss: loss * 2)


CHANGES = {
    "attribute": lambda side: setattr(side.model, "scale", 2.0),
    "same_attribute_of_other_type": lambda side: setattr(side.model, "scale", 1),
    "computed_name": lambda side: setattr(side.model, "named_gain", 3.0),
    "text": lambda side: setattr(side.model, "name", "other"),
    "dict": lambda side: side.model.options.update(shift=0.5),
    "list": lambda side: side.model.powers.__setitem__(1, 3),
    "object": lambda side: setattr(side.model.config, "gain", 2.0),
    "new_object": lambda side: setattr(side.model, "config", types.SimpleNamespace(gain=2.0)),
    "tensor": lambda side: setattr(side.model, "mask", torch.tensor([1.0, 0.0, 1.0, 0.0])),
    "buffer_that_was_none": lambda side: setattr(side.model, "bias", torch.ones(4)),
    "dropout": dropping,
    "hook": hook,
    "eval": lambda side: side.model.eval(),
    "layer": lambda side: setattr(side.model, "drop", nn.Tanh()),
    "hidden_attribute": lambda side: setattr(side.model.shown, "factor", 3.0),
    "user_dict": lambda side: side.model.user_dict.update(factor=2.0),
    "bytes": lambda side: side.model.numbers.__setitem__(0, 2),
    "method": lambda side: setattr(side.model.drop, "forward", lambda x: x * 2),
    "class": lambda side: setattr(side.model.drop, "__class__", nn.Identity),
    "momentum": lambda side: side.optimizer.param_groups[0].update(momentum=0.5),
    "nesterov": lambda side: side.optimizer.param_groups[0].update(nesterov=True),
    "foreach": lambda side: side.optimizer.param_groups[0].update(foreach=False),
}


@dataclasses.dataclass
class Batch:
    """A batch as a dataclass, with a number."""

    x: torch.Tensor
    y: torch.Tensor
    factor: float = 1.0


Pair = collections.namedtuple("Pair", "x y factor")


class Opaque:
    """A batch that nothing declares to be a container."""

    def __init__(self, x, y, factor):
        self.x, self.y, self.factor = x, y, factor


def attribute_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch.x) - batch.y).pow(2).mean() * batch.factor
    loss.backward()
    optimizer.step()
    return loss


def reused(side, x, y, factor):
    batch = side.own.__dict__.setdefault("batch", Opaque(x, y, factor))
    batch.x, batch.y, batch.factor = x, y, factor
    return batch


BATCHES = {
    "dataclass": lambda side, *fields: Batch(*fields),
    "named_tuple": lambda side, *fields: Pair(*fields),
    "namespace": lambda side, x, y, factor: types.SimpleNamespace(x=x, y=y, factor=factor),
    "opaque": lambda side, *fields: Opaque(*fields),
    "same_object": reused,
}


def clip(own, model, optimizer):
    torch.nn.utils.clip_grad_norm_(own.params, 0.05)


def double(own, model, optimizer):
    for p in own.params:
        p.grad = p.grad * 2


@torch.no_grad()
def decay(own, model, optimizer):
    for p in own.params:
        p.data -= 0.1 * p.data


def scale_those_in_set(own, model, optimizer):
    for p in model.parameters():
        if p in own.some:
            p.grad.mul_(0.5)


def scale_by_dict(own, model, optimizer):
    for p in model.parameters():
        p.grad.mul_(own.factors[p])


def scale_by_id(own, model, optimizer):
    for p in model.parameters():
        if id(p) in own.ids:
            p.grad.mul_(0.5)


@torch.no_grad()
def average(own, model, optimizer):
    for mean, p in zip(own.means, model.parameters(), strict=True):
        mean.lerp_(p, 0.1)
        p.grad.add_(mean, alpha=0.1)


def scale_the_same(found):
    """Scale the gradients of the parameters for which `found(own, p)` holds."""

    def act(own, model, optimizer):
        for p in model.parameters():
            if found(own, p):
                p.grad.mul_(0.5)

    return act


REACHED = {
    "clip": clip,
    "gradients": double,
    "data": decay,
    "set": scale_those_in_set,
    "dict": scale_by_dict,
    "ids": scale_by_id,
    "averages": average,
    "attribute": scale_the_same(lambda own, p: p is own.first),
    "tuple": scale_the_same(lambda own, p: p is own.pair[1][0]),
    "frozen_set": scale_the_same(lambda own, p: p in own.frozen),
    "number": scale_the_same(lambda own, p: id(p) == own.first_id),
    "tuple_of_numbers": scale_the_same(lambda own, p: id(p) in own.id_tuple),
    "variable": scale_the_same(lambda own, p: own.halve_first(p)),
    "default": scale_the_same(lambda own, p: own.halve_default(p)),
    "groups": lambda own, model, optimizer: torch._foreach_mul_([p.grad for p in own.params], 0.5),
}


def set_own(name, values):
    return lambda i, side: setattr(side.own, name, values[i])


def fill(i, side):
    side.own.__dict__.setdefault("number", torch.tensor(1.0)).fill_(1.0 + i // 2)


def rebind(i, side):
    side.own.number = torch.tensor(1.0 + i // 2)


def fill_array(i, side):
    side.own.__dict__.setdefault("array", numpy.ones(3, dtype=numpy.float32))[:] = 1 + i // 2


def default_of(side):
    def step(model, optimizer, batch, factor=1.0):
        optimizer.zero_grad()
        loss = (model(batch[0]) - batch[1]).pow(2).mean() * factor
        loss.backward()
        optimizer.step()
        return loss

    side.own.function = step
    return step


def cell_of(side):
    factor = 1.0

    def set_factor(value):
        nonlocal factor
        factor = value

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = (model(batch[0]) - batch[1]).pow(2).mean() * factor
        loss.backward()
        optimizer.step()
        return loss

    side.own.set_factor = set_factor
    return step


class Trainer:
    """A step that is a method, of an object with attributes that it reads and others that it does not."""

    def __init__(self):
        self.factor, self.calls = 1.0, 0

    def step(self, model, optimizer, batch):
        optimizer.zero_grad()
        loss = (model(batch[0]) - batch[1]).pow(2).mean() * self.factor
        loss.backward()
        optimizer.step()
        return loss


def method_of(side):
    side.own.trainer = Trainer()
    return side.own.trainer.step


def partial_of(side):
    def step(settings, model, optimizer, batch):
        return plain_step(model, optimizer, (batch[0] * settings["gain"], batch[1]))

    side.own.settings = {"gain": 1.0}
    return functools.partial(step, side.own.settings)


PYTHON = {
    "global": (scaled_by(lambda own: FACTOR), set_global),
    "global_object": (scaled_by(lambda own: HELPERS.scale(1.0)), helper),
    "attribute_of_object": (scaled_by(lambda own: own.factor), set_own("factor", [1.0, 1.0, 2.0, 2.0])),
    "tensor_filled": (scaled_by(lambda own: own.number), fill),
    "tensor_rebound": (scaled_by(lambda own: own.number), rebind),
    "tensor_read": (scaled_by(lambda own: own.number.numpy().item()), fill),
    "array": (scaled_by(lambda own: torch.from_numpy(own.array).sum()), fill_array),
    "default": (default_of, lambda i, side: setattr(side.own.function, "__defaults__", (1.0 + i // 2,))),
    "cell": (cell_of, lambda i, side: side.own.set_factor(1.0 + i // 2)),
    "method": (method_of, lambda i, side: setattr(side.own.trainer, "factor", 1.0 + i // 2)),
    "partial": (partial_of, lambda i, side: side.own.settings.update(gain=1.0 + i // 2)),
}


class TestGuards(DTensorContinuousTestBase):
    """Everything that a step may read from Python, changed between calls."""

    @property
    def world_size(self):
        return 2

    @parametrize("name", list(CHANGES))
    def test_model_or_optimizer_changed(self, name):
        scenario = Scenario(lambda side: plain_step, change_at(2, CHANGES[name]), model=Settings)
        traces = play(self, scenario, "replicate").traces
        self.assertEqual(traces, 3)  # without states, with them, and after the change

    def test_attribute_that_is_not_read(self):
        def change(i, side):
            side.model.__dict__["not_read"] = i

        scenario = Scenario(lambda side: plain_step, change)
        self.assertEqual(play(self, scenario, "replicate").traces, 2)

    @parametrize("name", list(PYTHON))
    def test_python_changed(self, name):
        step, change = PYTHON[name]
        play(self, Scenario(step, change), "replicate")

    def test_method_reads_only_what_it_names(self):
        def count(i, side):
            side.own.trainer.calls = i

        self.assertEqual(play(self, Scenario(method_of, count), "replicate").traces, 2)

    @parametrize("style", ["replicate", "fully_shard"])
    @parametrize("name", list(REACHED))
    def test_parameters_reached_another_way(self, name, style):
        play(self, Scenario(between(REACHED[name], keep_params), tolerance=1e-5), style)

    @parametrize("name", list(BATCHES))
    def test_batch(self, name):
        def arguments(model, side, batch):
            return model, side.optimizer, BATCHES[name](side, *batch, 1.0 + len(batch[0]) % 2)

        play(self, Scenario(lambda side: attribute_step, arguments=arguments), "replicate")

    def test_equal_numbers_in_a_batch(self):
        def weighted(model, optimizer, batch):
            x, y, a, b, c = batch
            return plain_step(model, optimizer, (x * a * b * math.copysign(2, c), y))

        def arguments(model, side, batch):
            return model, side.optimizer, (*batch, 2, 2, -0.0 if len(batch[0]) % 2 else 0.0)

        play(self, Scenario(lambda side: weighted, arguments=arguments), "replicate")

    def test_batch_that_the_step_changes(self):
        def popping(model, optimizer, batch):
            return plain_step(model, optimizer, (batch.pop("x"), batch["y"]))

        def arguments(model, side, batch):
            return model, side.optimizer, {"x": batch[0], "y": batch[1]}

        scenario = Scenario(lambda side: popping, arguments=arguments, refused="as an argument")
        play(self, scenario, "replicate")

    @parametrize("style", ["replicate", "fully_shard"])
    def test_rebound_buffer(self, style):
        play(self, Scenario(lambda side: plain_step, model=Rebinding), style)

    def test_global_settings(self):
        def step(model, optimizer, batch):
            factor = 2.0 if torch.ones(()).dtype == torch.float64 else 1.0
            return plain_step(model, optimizer, (batch[0] * factor, batch[1]))

        def arguments(model, side, batch):
            side.own.calls = getattr(side.own, "calls", -1) + 1
            torch.set_default_dtype(torch.float64 if side.own.calls == 2 else torch.float32)
            return model, side.optimizer, batch

        try:
            play(self, Scenario(lambda side: step, arguments=arguments, calls=3, sizes=(4,)), "replicate")
        finally:
            torch.set_default_dtype(torch.float32)

    def test_superseded_parameter(self):
        from torch_testing_ext.distributed._spmd import SPMDError

        torch.manual_seed(self.rank)
        model = small().to(self.device_type)
        params = list(model.parameters())
        batch = torch.randn(4, 10, device=self.device_type), torch.randn(4, 4, device=self.device_type)
        capture()(plain_step)(model, torch.optim.SGD(params, lr=0.1), batch)
        with self.assertRaisesRegex(SPMDError, "replaced by a DTensor"):
            params[0].norm()
        self.assertEqual(params[0].shape, (8, 10))


instantiate_parametrized_tests(TestGuards)

if __name__ == "__main__":
    run_tests()
