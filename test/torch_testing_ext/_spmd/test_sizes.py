"""A step may use the sizes of its inputs as numbers: the program holds for the sizes that it was traced with."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque

import numpy
import torch
from guarded import Scenario, play

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

BY_SIZE = {size: float(size % 4 + 1) for size in range(12)}
BY_TEXT = {str(size): factor for size, factor in BY_SIZE.items()}


def mse(model, x, y):
    return (model(x) - y).pow(2).mean()


def weighted(pairs, model):
    return sum(mse(model, x, y) * (i + 1) for i, (x, y) in enumerate(pairs))


def scaled(factor):
    return lambda model, x, y: mse(model, x, y) * factor(x)


def one_hot(model, x, y):
    n = len(x)
    return (torch.nn.functional.one_hot(torch.arange(n), n).float() @ (model(x) - y)).pow(2).mean()


FIXED = {
    "range": lambda model, x, y: weighted(((x[i : i + 1], y[i : i + 1]) for i in range(len(x))), model),
    "zip": lambda model, x, y: weighted(zip((a[None] for a in x), (b[None] for b in y), strict=True), model),
    "log": scaled(lambda x: math.log(x.shape[0])),
    "float": scaled(lambda x: float(x.size(0))),
    "isqrt": scaled(lambda x: int(math.sqrt(x.shape[0]))),
    "numel": scaled(lambda x: math.sqrt(x.numel())),
    "text": scaled(lambda x: BY_TEXT[f"{x.shape[0]}"]),
    "text_of_shape": scaled(lambda x: 2.0 if "5" in f"{x.shape}" else 1.0),
    "json": scaled(lambda x: float(json.dumps(x.shape[0]))),
    "key": scaled(lambda x: BY_SIZE[x.shape[0]]),
    "hash": scaled(lambda x: hash(x.shape[0]) % 5),
    "index": scaled(lambda x: [*BY_SIZE.values()][x.shape[0]]),
    "deque": scaled(lambda x: len(deque(range(30), maxlen=x.shape[0]))),
    "islice": scaled(lambda x: len([*itertools.islice(itertools.count(), x.shape[0])])),
    "numpy": scaled(lambda x: float(numpy.arange(x.shape[0]).sum())),
    "linspace": scaled(lambda x: torch.linspace(0, 1, x.shape[0]).pow(2).sum()),
    "one_hot": one_hot,
}
BRANCHES = {
    "equal": scaled(lambda x: 3.0 if x.shape[0] == 4 else 1.0),
    "equal_shape": scaled(lambda x: 3.0 if x.shape == (4, 10) else 1.0),
    "in_set": scaled(lambda x: 3.0 if x.shape[0] in {5, 6} else 1.0),
    "odd": scaled(lambda x: 3.0 if x.shape[0] % 2 else 1.0),
    "split": lambda model, x, y: weighted(zip(x.split(4), y.split(4), strict=True), model),
    "of_targets": lambda model, x, y: mse(model, x, y) * math.log(y.shape[0]),
}
SYMBOLIC = {
    "arithmetic": scaled(lambda x: x.shape[0] * 2 // 3 + x.shape[0] ** 0.5),
    "arange": scaled(lambda x: torch.arange(x.shape[0]).float().mean()),
    "is_int": scaled(lambda x: 3.0 if isinstance(x.shape[0], int) else 1.0),
    "chunk": lambda model, x, y: weighted(zip(x.chunk(2), y.chunk(2), strict=True), model),
}
SIZES = (4, 5, 6, 9, 4)


class Squared(torch.nn.Bilinear):
    """A bilinear form of twice the same input."""

    def forward(self, x):
        return super().forward(x, x)


def bilinear():
    return torch.nn.Sequential(Squared(10, 10, 4), torch.nn.Linear(4, 4))


def step_with(loss_of):
    def step(model, optimizer, batch):
        x, y = batch
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return lambda side: step


class TestSizes(DTensorContinuousTestBase):
    """Batch sizes as numbers, against DDP on two ranks with different sizes."""

    @property
    def world_size(self):
        return 2

    def _play(self, loss, style="replicate"):
        return play(self, Scenario(step_with(loss), sizes=SIZES, calls=len(SIZES), tolerance=1e-5), style)

    @parametrize("name", list(FIXED))
    def test_fixed(self, name):
        self._play(FIXED[name])

    @parametrize("name", list(BRANCHES))
    def test_branch(self, name):
        self._play(BRANCHES[name], "fully_shard")

    @parametrize("name", list(SYMBOLIC))
    def test_symbolic(self, name):
        self.assertEqual(self._play(SYMBOLIC[name]).traces, 2)  # without states, and with them

    @parametrize("style", ["replicate", "fully_shard"])
    def test_operation_composed_of_others(self, style):
        play(self, Scenario(step_with(mse), model=bilinear, sizes=SIZES, calls=len(SIZES), tolerance=1e-5), style)

    def test_input_of_other_dim(self):
        def loss(model, x, y):
            return mse(model, x.t(), y.t()) * len([*x.t()])

        def transposed(model, side, batch):
            return model, side.optimizer, tuple(t.t().contiguous() for t in batch)

        play(self, Scenario(step_with(loss), arguments=transposed, sizes=SIZES, calls=5, tolerance=1e-5), "replicate")


instantiate_parametrized_tests(TestSizes)

if __name__ == "__main__":
    run_tests()
