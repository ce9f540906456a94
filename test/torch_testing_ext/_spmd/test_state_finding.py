"""What the engine finds from a step and its arguments."""

import collections
import functools
import types
import weakref
from dataclasses import dataclass

import torch
from torch import nn

from torch_testing_ext._spmd.row_updates import runs_on_rows
from torch_testing_ext._spmd.state_finding import LONGEST, find_state
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import compile

GLOBAL = nn.Linear(2, 2)
NAMESPACE = types.SimpleNamespace(deep=types.SimpleNamespace(model=GLOBAL))
MODULE = types.ModuleType("settings_of_a_user")
MODULE.model = GLOBAL
MODULE.unnamed = nn.Linear(9, 9)


def plain():
    pass


def of_global():
    return GLOBAL


def of_namespace():
    return NAMESPACE.deep.model


def of_module():
    return MODULE.model


def of_inner_function():
    return [lambda: GLOBAL for _ in range(2)]


def of_other_function():
    return of_global()


def of_default(model=GLOBAL):
    return model


def of_keyword_default(*, model=GLOBAL):
    return model


class OfClass:
    model = GLOBAL

    def step(self):
        return self.model


class Calling:
    def __call__(self):
        return self.loss()

    def loss(self):
        return GLOBAL

    @staticmethod
    def of_static():
        return GLOBAL


def calls_loss(trainer):
    return trainer.loss()


class Slotted:
    __slots__ = ("model",)

    def __init__(self):
        self.model = GLOBAL


@dataclass
class Fields:
    model: nn.Module


class Training(nn.Module):
    """A module with a step, as in Lightning."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)


def closure():
    model = GLOBAL
    return lambda: model


def other_step():
    return GLOBAL


INNER = compile()(other_step)


def of_compiled_step():
    return INNER()


def unbound():
    def step():
        return later  # noqa: F821

    later = GLOBAL
    del later
    return step


TRAINING = Training()
FOUND = {
    "argument": (plain, [GLOBAL]),
    "list": (plain, [[1, (GLOBAL,)]]),
    "dict": (plain, [{"a": {"b": GLOBAL}}]),
    "deque": (plain, [collections.deque([GLOBAL])]),
    "set_of_one": (plain, [{GLOBAL}]),
    "object": (plain, [types.SimpleNamespace(trainer=types.SimpleNamespace(model=GLOBAL))]),
    "dataclass": (plain, [Fields(GLOBAL)]),
    "slots": (plain, [Slotted()]),
    "class_attribute": (plain, [OfClass()]),
    "method": (OfClass().step, []),
    "other_method": (Calling().__call__, []),
    "callable": (Calling(), []),
    "method_of_an_argument": (calls_loss, [Calling()]),
    "static_method": (lambda trainer: trainer.of_static(), [Calling()]),
    "weak_reference": (plain, [weakref.ref(GLOBAL)]),
    "partial": (functools.partial(plain, GLOBAL), []),
    "closure": (closure(), []),
    "global": (of_global, []),
    "namespace": (of_namespace, []),
    "python_module": (of_module, []),
    "inner_function": (of_inner_function, []),
    "other_function": (of_other_function, []),
    "compiled_step": (of_compiled_step, []),
    "default": (of_default, []),
    "keyword_default": (of_keyword_default, []),
    "bound_method_of_a_module": (plain, [GLOBAL.forward]),
}


class TestFinding(TestCase):
    """One place after the other."""

    @parametrize("name", [*FOUND])
    def test_finds(self, name):
        step, args = FOUND[name]
        self.assertIs(find_state(step, args).modules[0], GLOBAL)
        self.assertEqual(len(find_state(step, args).modules), 1)

    def test_keyword(self):
        self.assertIs(find_state(plain, (), {"model": GLOBAL}).modules[0], GLOBAL)

    def test_optimizers(self):
        optimizer = torch.optim.SGD(GLOBAL.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        self.assertIs(find_state(plain, [schedule]).optimizers[0], optimizer)
        self.assertIs(find_state(plain, [TRAINING]).optimizers[0], TRAINING.optimizer)

    def test_only_roots(self):
        self.assertEqual(find_state(plain, [TRAINING.layer, TRAINING]).modules, [TRAINING])

    def test_order_is_that_of_depth(self):
        first, second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.assertEqual(find_state(plain, [[[second]], first]).modules, [first, second])

    def test_leaves_alone(self):
        two = {nn.Linear(1, 1), nn.Linear(1, 1)}  # in an order that differs between ranks
        for value in ([GLOBAL] * (LONGEST + 1), two, torch.optim.SGD, nn.Linear, nn, Calling()):
            self.assertEqual(find_state(plain, [value]).modules, [])
        self.assertEqual(find_state(unbound()).modules, [])

    def test_tensors(self):
        x = torch.ones(2)
        self.assertEqual(len(find_state(plain, [(x, x)]).tensors), 1)


def sgd(**options):
    return torch.optim.SGD(GLOBAL.parameters(), lr=0.1, **options)


def hooked():
    optimizer = sgd()
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def scheduled():
    optimizer = sgd()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def replaced():
    optimizer = sgd()
    optimizer.step = lambda: None
    return optimizer


class Derived(torch.optim.SGD):
    """Might do anything."""


KINDS = {
    "plain": (sgd, True),
    "scheduled": (scheduled, True),
    "hooks": (hooked, False),
    "replaced": (replaced, False),
    "derived": (lambda: Derived(GLOBAL.parameters(), lr=0.1), False),
    "lbfgs": (lambda: torch.optim.LBFGS(GLOBAL.parameters()), False),
    "differentiable": (lambda: sgd(differentiable=True), False),
}


class TestOptimizerKinds(TestCase):
    """Which optimizers update rows."""

    @parametrize("name", [*KINDS])
    def test_runs_on_rows(self, name):
        make, expected = KINDS[name]
        self.assertIs(runs_on_rows(make()), expected)


instantiate_parametrized_tests(TestFinding)
instantiate_parametrized_tests(TestOptimizerKinds)

if __name__ == "__main__":
    run_tests()
