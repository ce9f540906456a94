"""What a step returns: each call builds its own containers of tensors; other objects are refused."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from typing import Any

import numpy as np
import torch
from guarded import momentum, small
from spmd_training import capture, normal_batch

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase


@dataclasses.dataclass
class Output:
    loss: Any
    parts: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenOutput:
    loss: Any


class Holder:
    def __init__(self, loss):
        self.loss = loss


class Metrics(dict):
    pass


Named = collections.namedtuple("Named", "loss count")


def all_containers(loss, out):
    return {
        "record": Output(loss, [FrozenOutput(out), types.SimpleNamespace(loss=loss, kind="mean")]),
        "named": Named(loss, len(out)),
        "user_dict": collections.UserDict(loss=loss),
        "ordered": collections.OrderedDict(loss=loss),
        "default": collections.defaultdict(list, loss=[loss]),
        "plain": (1, 2.5, "mean", None, out.dtype, range(3), frozenset({1, 2}), slice(2)),
        "functions": (len, normal_batch, str, torch),
    }


def contains_itself(loss):
    found = [loss]
    found.append(found)
    return found


REFUSED = {
    "object": (Holder, "an object of type Holder"),
    "inside": (lambda loss: Output(loss, [Holder(1)]), "an object of type Holder"),
    "set": (lambda loss: {loss}, "an object of type set"),
    "set_of_numbers": (lambda loss: {1, 2}, "an object of type set"),
    "keys": (lambda loss: [{loss: 1}], "a dict with tensors as keys"),
    "subclass": (lambda loss: Metrics(loss=loss), "an object of type Metrics"),
    "counter": (lambda loss: collections.Counter("ab"), "an object of type Counter"),
    "generator": (lambda loss: (each for each in [loss]), "an object of type generator"),
    "iterator": (lambda loss: iter([1]), "an object of type list_iterator"),
    "closure": (lambda loss: lambda: loss, "an object of type function"),
    "default": (lambda loss: lambda value=loss: value, "an object of type function"),
    "partial": (lambda loss: functools.partial(print, loss), "an object of type partial"),
    "bound": (lambda loss: loss.sum, "an object of type builtin_function_or_method"),
    "array": (lambda loss: np.ones(2), "an object of type ndarray"),
    "node": (lambda loss: loss.grad_fn, "an object of type .*Backward"),
    "cycle": (contains_itself, "an object that contains itself"),
}


class TestResults(DTensorContinuousTestBase):
    world_size = 2

    def step_that_returns(self, make, style):
        @capture(parallel_mode=DataParallel(style))
        def step(model, optimizer, batch):
            optimizer.zero_grad()
            out = model(batch[0])
            loss = (out - batch[1]).pow(2).mean()
            loss.backward()
            optimizer.step()
            return make(loss, out)

        model = small().to(self.device_type)
        return functools.partial(step, model, momentum(model.parameters()))

    def batch(self, call, size=4):
        return [each.to(self.device_type) for each in normal_batch(size + call, 10)(self.rank, call)]

    @parametrize("style", ["replicate", "fully_shard"])
    def test_containers_are_rebuilt(self, style):
        steps = []
        for make in (all_containers, lambda loss, out: (loss, out)):
            torch.manual_seed(0)
            steps.append(self.step_that_returns(make, style))
        before = None
        for call in range(3):
            found, (loss, out) = (step(self.batch(call)) for step in steps)
            record, plain = found["record"], found["plain"]
            frozen, namespace = record.parts
            self.assertEqual([type(record), type(frozen)], [Output, FrozenOutput])
            self.assertEqual([record.loss, frozen.loss, vars(namespace)], [loss, out, {"loss": loss, "kind": "mean"}])
            self.assertEqual(found["named"], Named(loss, 4 + call))
            self.assertEqual(found["user_dict"].data, {"loss": loss})
            self.assertEqual(
                [type(found["ordered"]), dict(found["ordered"])], [collections.OrderedDict, {"loss": loss}]
            )
            self.assertEqual([found["default"]["loss"], found["default"]["other"]], [[loss], []])
            self.assertEqual(plain, (1, 2.5, "mean", None, out.dtype, range(3), frozenset({1, 2}), slice(2)))
            self.assertEqual(found["functions"], (len, normal_batch, str, torch))
            self.assertIsNot(record, before)
            before = record

    @parametrize("name", list(REFUSED))
    def test_other_objects_are_refused(self, name):
        make, message = REFUSED[name]
        step = self.step_that_returns(lambda loss, out: make(loss), "replicate")
        with self.assertRaisesRegex(SPMDError, f"The step returns {message}"):
            step(self.batch(0))

    def test_an_object_that_was_passed_in_may_be_returned(self):
        holder = Holder(None)

        @capture(parallel_mode=DataParallel("replicate"))
        def step(model, optimizer, batch, holder):
            model(batch[0]).sum().backward()
            optimizer.step()
            return holder, model, batch[1]

        model, batch = small().to(self.device_type), self.batch(0)
        result = step(model, momentum(model.parameters()), batch, holder)
        for found, expected in zip(result, (holder, model, batch[1]), strict=True):
            self.assertIs(found, expected)


instantiate_parametrized_tests(TestResults)

if __name__ == "__main__":
    run_tests()
