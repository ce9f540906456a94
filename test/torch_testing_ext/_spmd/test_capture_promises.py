"""The table on captured programs in docs/compiler/captured.md: a test for each promise, and for each that you make."""

from __future__ import annotations

import ast
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

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
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
    "parameter": lambda c: c.replace_parameter(torch.zeros(4)),
    "shape_of_a_parameter": lambda c: c.replace_parameter(torch.zeros(1)),
    "groups": lambda c: c.optimizer.add_param_group({"params": [c.optimizer.param_groups[0]["params"].pop()], "lr": 1}),
    "states": lambda c: c.optimizer.state.pop(c.model.second.weight) and None,
    "autocast": lambda c: c.enter(torch.autocast("cpu", dtype=torch.bfloat16)),
    "default_dtype": lambda c: c.enter_setting(torch.set_default_dtype, torch.float32, torch.float64),
    "precision": lambda c: c.enter_setting(torch.set_float32_matmul_precision, "highest", "medium"),
    "attention": lambda c: c.enter_setting(torch.backends.cuda.enable_math_sdp, True, False),
}


START = time.monotonic()
# The same program, with other inputs.
SAME_PROGRAM = ["buffer"]


SCALE = 1.0


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
    "global": (lambda: SCALE, lambda: globals().update(SCALE=2.0)),
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

    def replace_parameter(self, value):
        """Let the bias of the second layer, and of the optimizer, be another one."""
        params, old, new = self.optimizer.param_groups[0]["params"], self.model.second.bias, nn.Parameter(value)
        self.model.second.bias = new
        params[[param is old for param in params].index(True)] = new
        del self.optimizer.state[old]

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
                with (
                    mock.patch.multiple(Python, value=1.0, calls=0, function=Python.function),
                    mock.patch.dict(globals(), SCALE=1.0),
                ):
                    self._prepare()
                    self._expect_error(step, change)

    def test_your_word_in_a_hook(self):
        with mock.patch.object(Python, "value", 1.0):
            self._prepare()
            self.model.first.register_forward_hook(lambda module, inputs, output: output * Python.value)
            self._expect_error(self.function, lambda: setattr(Python, "value", 2.0))

    def _expect_error(self, function, change):
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


# The cells of the table, and the tests of each promise in them, here and in test_capture_errors.py.
TABLE = {
    "the step's own code": ["code_of_the_step"],
    "arguments: their structure": ["structure"],
    "shape, strides, dtype and device of tensors": ["shape", "strides", "dtype"],
    "plain values": ["plain_value"],
    "identity of other objects": ["other_object"],
    "globals, closures, attributes, counters, environment, files, clocks": [
        *("global", "other_function", "attribute", "counter", "environment", "file", "clock")
    ],
    "random numbers of Python and NumPy": ["random", "numpy"],
    "control flow on values of tensors": ["branching", "test_optimizers_that_branch_on_values"],
    "tensors as numbers or NumPy arrays": ["number", "array"],
    "modules: identity, class, `training`, code of `forward`, number of hooks": [
        *("module", "class_of_a_module", "training", "forward", "forward_hook")
    ],
    "code of other functions, and values that hooks read": ["other_function", "test_your_word_in_a_hook"],
    "sparse gradients, `create_graph`, tensor subclasses as arguments": [
        *("test_sparse_gradients", "double_backward", "test_arguments")
    ],
    "parameters and buffers: identity, shape, dtype, device, `requires_grad`, hooks": [
        *("parameter", "shape_of_a_parameter", "frozen"),
        *("buffer", "dtype_of_a_buffer", "test_hooks_of_later_calls"),
    ],
    "whether each has a gradient": ["gradients"],
    "effects: `print`, counters and schedulers in the step act only while it is recorded": ["test_effects_of_python"],
    "trainable tensors that no module of the step holds": ["test_tensors_of_no_module"],
    "optimizers: groups, settings, states by identity": ["groups", "setting", "states"],
    "a step that changes a setting of an optimizer, or one that counts in Python numbers": [
        *("scheduling", "test_optimizer_that_counts")
    ],
    "autocast, grad mode, default dtype, precision of matrix products, choice of attention kernels": [
        *("autocast", "test_without_gradients", "default_dtype", "precision", "attention")
    ],
    "results other than tensors, plain values, and containers of them": ["record"],
}


def names_in(file):
    """The functions of a file, its tests among them, and the keys of its tables."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    keys = {
        key.value for node in nodes if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)
    }
    return keys | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


class TestTable(TestCase):
    """The table promises what is tested, and no more."""

    def test_cells(self):
        page = (Path(__file__).resolve().parents[3] / "docs" / "compiler" / "captured.md").read_text()
        section = page.split("\n## What may change\n")[1].partition("\n## ")[0]
        rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][2:]
        promises = {promise.strip() for row in rows for cell in row for promise in cell.split("; ")} - {""}
        self.assertEqual(promises, {*TABLE})

    def test_tests(self):
        tests = {*GUARDED, *WORD, *vars(TestPromises)}
        tests |= names_in(Path(__file__).with_name("test_capture_errors.py"))
        for name in {name for names in TABLE.values() for name in names} - tests:
            self.assertTrue(any(test.startswith(f"{name}_") for test in tests), name)


instantiate_parametrized_tests(TestPromises)

if __name__ == "__main__":
    run_tests()
