"""Tests that vendoring follows each name of the mirror to its definition, and copies what the definition needs."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.upstream import defined_names, mapping
from torch_testing_ext.upstream.mapping import OUR_KIT, UserError

sys.path.insert(0, str(Path(__file__).parents[3] / "patches"))

import vendoring

COMMON_DTENSOR = "torch_testing_ext.distributed._tensor.common_dtensor"
# The compiler is a package of its own, which PyTorch removed.
MODULES = [pair.ours for pair in mapping.MIRRORED if pair.until is None]


def own_names(module: str) -> Iterator[str]:
    """The public classes and functions of ours that a mirror module offers, including those it imports on first use."""
    mirror = importlib.import_module(module)
    for name in dir(mirror):
        value: Any = getattr(mirror, name)
        is_ours = (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith(OUR_KIT)
        if is_ours and not name.startswith("_"):
            yield name


# All of their definitions depend on modules that PyTorch does not have.
NOTHING_TO_COPY = {f"{OUR_KIT}.two_tensor"}


@instantiate_parametrized_tests
class VendoringTest(TestCase):
    """Checkouts whose helper modules are empty, except for what a test writes to them."""

    def setUp(self) -> None:
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.checkout = Path(directory.name)
        for module in MODULES:
            self.write_helper(module, "")

    def helper(self, module: str) -> Path:
        theirs = mapping.module_on(mapping.Side.THEIRS, module)
        assert theirs is not None
        return self.checkout.joinpath(*theirs.split(".")).with_suffix(".py")

    def write_helper(self, module: str, text: str) -> None:
        file = self.helper(module)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def vendored(self, module: str, *wanted: str) -> str:
        """The text of the helper module with these names appended."""
        contents = vendoring.appended([f"{module}.{name}" for name in wanted], self.checkout)
        self.assertEqual(list(contents), [self.helper(module).relative_to(self.checkout)])
        return contents[self.helper(module).relative_to(self.checkout)].decode()

    @parametrize("module", MODULES)
    def test_each_definition_is_found_and_is_complete(self, module: str) -> None:
        copied = 0
        for name in own_names(module):
            try:
                text = self.vendored(module, name)
            except UserError as error:
                self.assertRegex(str(error), "it depends on torch_testing_ext.*, a module that PyTorch does not have")
                continue
            copied += 1
            nodes = list(defined_names.statements(ast.parse(text).body))
            imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
            self.assertEqual(
                [ast.unparse(node) for node in imports if node.level or OUR_KIT in (node.module or "")], []
            )
            self.assertIn(name, {bound for node in nodes for bound, _ in defined_names.bound_by(node)})
        self.assertEqual(copied > 0, module not in NOTHING_TO_COPY)

    def test_a_definition_brings_those_of_other_modules(self) -> None:
        scope: dict[str, Any] = {}
        text = self.vendored("torch_testing_ext.common_distributed", "skip_if_rocm_multiprocess")
        exec(text, scope)
        self.assertEqual(scope["TEST_SKIPS"]["skipIfRocm"].exit_code, 78)
        self.assertEqual(text.count("\nclass TestSkip"), 1)

    def test_a_name_that_the_mirror_imports_on_first_use(self) -> None:
        scope: dict[str, Any] = {"__name__": "vendored"}
        exec(self.vendored(COMMON_DTENSOR, "MLPStacked"), scope)
        self.assertEqual(len(scope["MLPStacked"]("cpu", n_layers=3).layers), 3)

    def test_a_name_that_is_computed_on_first_use_is_refused(self) -> None:
        with self.assertRaisesRegex(UserError, "DEVICE_TYPE: common_dtensor.py computes it on first use"):
            self.vendored(COMMON_DTENSOR, "DEVICE_TYPE")

    def test_a_dependency_that_pytorch_has_too_is_not_copied(self) -> None:
        self.write_helper(COMMON_DTENSOR, "class MLPModule: ...\n")
        text = self.vendored(COMMON_DTENSOR, "MLPStacked")
        self.assertEqual(text.count("class MLPModule"), 1)


if __name__ == "__main__":
    run_tests()
