"""The table of docs/spmd.md on captured programs: a test for each promise, and for each that you make."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import time
import types
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import torch.nn.functional as F
from spmd_training import capture, normal_batch
from torch import nn

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import SPMDError
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase


class Model(nn.Module):
    """Two layers, a buffer, and attention."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x):
        hidden = torch.tanh(self.first(x) + self.shift)[None, None]
        return self.second(F.scaled_dot_product_attention(hidden, hidden, hidden)[0, 0])


class Other(Model):
    """Another class with the same parameters."""

    def forward(self, x):
        return 2 * super().forward(x)


def doubled(self, x):
    return 2 * self.second(torch.tanh(self.first(x)))


def train(model, optimizer, batch, scale=1.0, extra=None):
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean() * scale
    loss.backward()
    optimizer.step()
    return loss


def negated(model, optimizer, batch, scale=1.0, extra=None):
    optimizer.zero_grad()
    loss = -(model(batch[0]) - batch[1]).pow(2).mean() * scale
    loss.backward()
    optimizer.step()
    return loss


# Each changes something between two calls; a value that it returns is more arguments of the second one.
GUARDED = {
    "code_of_the_step": lambda c: setattr(c.function, "__code__", negated.__code__),
    "structure": lambda c: {"extra": {"more": 1}},
    "shape": lambda c: c.resize(3),
    "strides": lambda c: setattr(c, "batch", (c.batch[0].t().contiguous().t(), c.batch[1])),
    "dtype": lambda c: setattr(c, "batch", (c.batch[0], c.batch[1].double())),
    "plain_value": lambda c: {"scale": 3.0},
    "other_object": lambda c: {"extra": Path("a")},
    "training": lambda c: c.model.eval(),
    "class_of_a_module": lambda c: setattr(c.model, "__class__", Other),
    "forward": lambda c: setattr(c.model, "forward", types.MethodType(doubled, c.model)),
    "module": lambda c: setattr(c.model, "second", nn.Sequential(c.model.second, nn.Tanh())),
    "forward_hook": lambda c: c.model.first.register_forward_hook(lambda module, inputs, output: output * 2),
    "frozen": lambda c: c.model.first.requires_grad_(False),
    "buffer": lambda c: c.model.register_buffer("shift", torch.zeros(8)),
    "dtype_of_a_buffer": lambda c: c.model.register_buffer("shift", torch.zeros(8, dtype=torch.float16)),
    "gradients": lambda c: c.optimizer.zero_grad(),
    "setting": lambda c: c.optimizer.param_groups[0].update(weight_decay=0.1),
    "autocast": lambda c: c.enter(torch.autocast("cpu", dtype=torch.bfloat16)),
    "default_dtype": lambda c: c.enter_setting(torch.set_default_dtype, torch.float32, torch.float64),
    "precision": lambda c: c.enter_setting(torch.set_float32_matmul_precision, "highest", "medium"),
    "attention": lambda c: c.enter_setting(torch.backends.cuda.enable_math_sdp, True, False),
}


START = time.monotonic()
# The same program, with other inputs.
SAME_PROGRAM = ["buffer"]


# What a program does not see: each function is read by the step, and has changed at the next call.
class Python:
    value = 1.0
    text = "1.0"
    calls = 0
    function = staticmethod(lambda: 1.0)


def counted():
    Python.calls += 1
    return float(Python.calls)


def in_file():
    return float(Path(os.environ["SPMD_FILE"]).read_text())


def write(text):
    Path(os.environ["SPMD_FILE"]).write_text(text)


WORD = {
    "attribute": (lambda: Python.value, lambda: setattr(Python, "value", 2.0)),
    "counter": (counted, lambda: None),
    "environment": (lambda: float(os.environ.get("SPMD_SCALE", 1)), lambda: os.environ.update(SPMD_SCALE="2")),
    "file": (in_file, lambda: write("2.0")),
    "clock": (lambda: (time.monotonic() - START) / 10, lambda: None),
    "random": (random.random, lambda: None),
    "numpy": (lambda: float(np.random.rand()), lambda: None),
    "other_function": (lambda: Python.function(), lambda: setattr(Python, "function", staticmethod(lambda: 2.0))),
}


class TestPromises(DTensorContinuousTestBase):
    """The columns of the table, on two persistent ranks."""

    world_size = 2

    def _prepare(self, contexts=None):
        torch.manual_seed(self.rank)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.resize(6)
        self.function = types.FunctionType(train.__code__, train.__globals__, "train", train.__defaults__)
        self.contexts = contexts

    def resize(self, size):
        self.batch = normal_batch(size, 10)(self.rank, 0)

    def enter(self, context):
        self.contexts.enter_context(context)

    def enter_setting(self, setter, before, after):
        setter(after)
        self.contexts.callback(setter, before)

    @parametrize("name", [*GUARDED])
    def test_guarded(self, name):
        with contextlib.ExitStack() as contexts:
            self._prepare(contexts)
            step = capture(verify="always")(self.function)
            for _ in range(2):  # without states, and with them
                step(self.model, self.optimizer, self.batch)
            recordings = step.recordings
            more = GUARDED[name](self)
            more = more if isinstance(more, dict) else {}
            step(self.model, self.optimizer, self.batch, **more)
            self.assertEqual(step.recordings, recordings + (name not in SAME_PROGRAM))

    @parametrize("name", [*WORD])
    def test_your_word(self, name):
        """A change has no effect, until a call is verified: then it is an error, also in what is only returned."""
        read, change = WORD[name]
        for returns_it in (False, True):

            def step(model, optimizer, batch, returns_it=returns_it):
                value = read()
                loss = train(model, optimizer, batch, 1.0 if returns_it else value)
                return {"loss": loss, "value": value} if returns_it else loss

            with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
                os.environ["SPMD_FILE"] = str(Path(folder, "value"))
                write("1.0")
                with mock.patch.multiple(Python, value=1.0, calls=0, function=Python.function):
                    self._expect_error(step, change)

    def _expect_error(self, function, change):
        self._prepare()
        step = capture(verify="off")(function)
        for _ in range(3):
            step(self.model, self.optimizer, self.batch)
        change()
        recordings = step.recordings
        step(self.model, self.optimizer, self.batch)
        self.assertEqual(step.recordings, recordings)
        step.verify = "always"
        before = [param.detach().clone() for param in self.model.parameters()]
        with self.assertRaisesRegex(SPMDError, "not equivalent to the engine"):
            step(self.model, self.optimizer, self.batch)
        self.assertEqual([*self.model.parameters()], before)

    @parametrize(
        "name, results",
        [
            ("key", ({"a": 1}, {"b": 1})),
            ("kind", ([1], (1,))),
            ("number", (1000000.0, 1000001.0)),
            ("integer", (1, 2)),
            ("text", ("a", "b")),
            ("none", (None, 0)),
            ("truth", (True, False)),
        ],
    )
    def test_results(self, name, results):
        """A difference in what the step returns is an error of verification."""
        self._prepare()
        calls = iter([*[results[0]] * 3, *[results[1]] * 9])

        def step(model, optimizer, batch):
            train(model, optimizer, batch)
            return next(calls)

        compiled = capture(verify="always")(step)
        with self.assertRaisesRegex(SPMDError, "not equivalent to the engine: .*result"):
            for _ in range(4):
                compiled(self.model, self.optimizer, self.batch)

    def test_effects_of_python(self):
        """They act while the step is recorded, and in verified calls."""
        self._prepare()
        seen = []

        def step(model, optimizer, batch):
            seen.append(len(seen))
            return train(model, optimizer, batch)

        compiled = capture(verify="off")(step)
        for _ in range(4):
            compiled(self.model, self.optimizer, self.batch)
        before = len(seen)
        compiled(self.model, self.optimizer, self.batch)
        self.assertEqual(len(seen), before)
        compiled.verify = "always"
        compiled(self.model, self.optimizer, self.batch)
        self.assertEqual(len(seen), before + 1)


instantiate_parametrized_tests(TestPromises)

if __name__ == "__main__":
    run_tests()
