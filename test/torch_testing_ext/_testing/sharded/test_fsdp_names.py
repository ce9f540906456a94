"""The names that tests import from PyTorch's common_fsdp and common_dist_composable are here, and are called the same.

PyTorch's files are read, not imported.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import OneRank
from torch import nn

from torch_testing_ext import common_dist_composable, common_fsdp
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

THEIRS = Path(torch.__file__).parent / "testing" / "_internal"

MODULES = {"common_fsdp": common_fsdp, "common_dist_composable": common_dist_composable}

Function = ast.FunctionDef


def definitions(module: str) -> list[Any]:
    body = ast.parse((THEIRS / f"{module}.py").read_text()).body
    return [node for node in body if isinstance(node, (ast.ClassDef, Function))]


def functions(module: str) -> Iterator[tuple[str, Function]]:
    """Iterate over the functions and methods, with their dotted names."""
    for node in definitions(module):
        if isinstance(node, Function):
            yield node.name, node
        else:
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, Function))


def find(module: str, dotted: str) -> Any:
    found: Any = MODULES[module]
    for name in dotted.split("."):
        found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
    return getattr(found, "__func__", getattr(found, "fget", found))


NO_DEFAULT, OTHER_DEFAULT = object(), object()


def keywords(node: Function) -> dict[str, Any]:
    """The parameters of a definition, with their defaults. Of those that are no literal, only that they are there."""
    given = node.args
    plain = given.posonlyargs + given.args
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults + given.kw_defaults
    return {arg.arg: literal(default) for arg, default in zip(plain + given.kwonlyargs, defaults, strict=True)}


def literal(node: ast.expr | None) -> Any:
    if node is None:
        return NO_DEFAULT
    return node.value if isinstance(node, ast.Constant) else OTHER_DEFAULT


def default_of(parameter: inspect.Parameter) -> Any:
    default = parameter.default
    if default is parameter.empty:
        return NO_DEFAULT
    return default if isinstance(default, bool | int | float | str | None) else OTHER_DEFAULT


@instantiate_parametrized_tests
class NamesTest(TestCase):
    @parametrize("module", list(MODULES))
    def test_every_class_and_function_is_here(self, module: str) -> None:
        missing = [node.name for node in definitions(module) if not hasattr(MODULES[module], node.name)]
        self.assertEqual(missing, [])
        self.assertGreater(len(definitions(module)), 5)

    @parametrize("module", list(MODULES))
    def test_parameters_have_the_same_names_and_defaults(self, module: str) -> None:
        compared = 0
        for name, node in functions(module):
            try:
                ours = find(module, name)
            except AttributeError:
                continue  # inherited here, or a method that PyTorch has put inside another
            takes = inspect.signature(ours).parameters.values()
            named = {p.name: default_of(p) for p in takes if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
            self.assertEqual(named, keywords(node), msg=name)
            compared += 1
        self.assertGreater(compared, 10)

    def test_values_determined_late(self) -> None:
        for name in ("DEVICE_TYPE", "DISTRIBUTED_BACKEND", "DEVICE_COUNT"):
            self.assertIsNotNone(getattr(common_fsdp, name))
        with self.assertRaisesRegex(AttributeError, "no attribute 'DEVICE'"):
            _ = common_fsdp.DEVICE
        self.assertIs(common_fsdp.CUDAInitMode, common_fsdp.DEVICEInitMode)

    @pytest.mark.slow
    def test_import_asks_for_no_device_and_compiles_nothing(self) -> None:
        code = (
            "import sys; from unittest import mock; from torch_testing_ext._machine import accelerators\n"
            "with mock.patch.object(accelerators, '_answer', side_effect=AssertionError('asked for devices')):\n"
            "    import torch_testing_ext.common_fsdp, torch_testing_ext.common_dist_composable\n"
            "import torch; assert not torch.cuda.is_initialized()\n"
            "unwanted = ('torch._dynamo', 'torch.testing._internal.common_utils')\n"
            "print([name for name in unwanted if name in sys.modules])\n"
        )
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        self.assertEqual(said.stdout.strip(), "[]", msg=said.stderr)


@instantiate_parametrized_tests
class ComposableModelsTest(OneRank):
    """In a rank: if torch is built for CUDA, a backward leaves threads, which prevent later forks."""

    @parametrize("name", ["UnitModule", "CompositeModel", "UnitParamModule", "CompositeParamModel"])
    def test_every_parameter_takes_part(self, name: str) -> None:
        model = getattr(common_dist_composable, name)(torch.device("cpu"))
        model(torch.rand(2, 100)).sum().backward()
        self.assertEqual([key for key, param in model.named_parameters() if param.grad is None], [])

    def test_fake_sequential_hides_its_modules(self) -> None:
        inner = nn.Linear(3, 2)
        fake = common_dist_composable.FakeSequential(inner, nn.ReLU())
        self.assertEqual(list(fake.children()), [])
        batch = torch.rand(4, 3)
        self.assertEqual(fake(batch), inner(batch).relu())

    def test_nested_sequential_model(self) -> None:
        model = common_dist_composable.NestedSequentialModel(torch.device("cpu"))
        self.assertEqual(model(torch.rand(5, 1)).shape, (5, 4))
        self.assertEqual([name for name, _ in model.named_children()], ["seq1", "lin", "seq2"])


if __name__ == "__main__":
    run_tests()
