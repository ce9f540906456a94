"""The suites that PyTorch has, too, have its header lines, names, parameters and order, and what is ours after them.

`subjects/pytorch_outlines/` has the outline of each of PyTorch's files, in its newest version that we have seen.
"""

from __future__ import annotations

import ast
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OUTLINES = Path(__file__).parent / "subjects" / "pytorch_outlines"
SUITES = Path(__file__).parents[2] / "distributed"
HEADERS = ("# Owner(s):", "# Copyright")
REPLICATE = "replicate_with_compiler.py"

# Each is a path of PyTorch's, below test/distributed.
PATHS = {
    "_composable/test_replicate_with_compiler.py",
    "_spmd/test_data_parallel.py",
    "fsdp/test_fsdp_tp_integration.py",
    "tensor/parallel/test_ddp_2d_parallel.py",
    "tensor/parallel/test_tp_examples.py",
}
# What PyTorch's file has and ours does not, with the reason.
LEFT_OUT = {
    "fsdp_tp_integration.py": {
        "device_type": "a property of the class: the CPU beside 1 to 3 accelerators, too",
        "TestTPFSDPIntegration._get_sub_pgs": "PyTorch's file does not call it",
    },
    REPLICATE: {
        "compiler_fn(no_inductor)": "float16 runs through inductor here",
        "ReplicateTest._test_compile(no_inductor)": "float16 runs through inductor here",
        "ReplicateTest.tearDown": "the base removes the file of the store",
        "DDP_TP_Test.tearDown": "the base leaves the group: each test has its own ranks",
    },
}
# The classes whose bases are others than in PyTorch's newest version, with the reason.
OTHER_BASES = {
    "fsdp_tp_integration.py": {
        "TestTPFSDPIntegration": "fresh ranks, as at first; TestTPFSDPIntegrationContinuous has PyTorch's",
    },
    REPLICATE: {
        "MultiProcessInductorTestCase": "graphs are never cached, which InductorTestCase sees to",
        "DDP_TP_Test": "its ranks are real, not of the fake backend",
    },
}
# The calls of PyTorch's modules that ours make of something else, with the reason.
OTHER_CALLS = {
    "tp_examples.py": {
        "instantiate_parametrized_tests(DistTensorParallelExampleTestWithLocalTensor)": "done before, of the class",
        "instantiate_device_type_tests(DistTensorParallelExampleTest)": "of a copy: the class stays, for the CPU",
    },
}
# What ours has in front of PyTorch's, since the definitions there need it.
FIRST = {
    "tp_examples.py": ["multi_dim_loss", "thaw_name", "DistTensorParallelExampleTest.world_size"],
    "ddp_2d_parallel.py": ["TwoDParallel", "Test2dParallelIntegration.world_size"],
    "fsdp_tp_integration.py": [f"TestTPFSDPIntegration.{name}" for name in ("world_size", "device_type", "device")],
    REPLICATE: [
        *("needs_cpp_compiler", "on_cpu", "accelerator", "_compile_once"),
        *("DDP_TP_Test.world_size", "DDP_TP_Test.device_type"),
    ],
}


class Definition(NamedTuple):
    """A function, a class or a constant of a file, by its dotted name."""

    name: str
    parameters: tuple[str, ...] = ()
    cases: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of each `parametrize`: its names and values
    is_constant: bool = False
    bases: tuple[str, ...] = ()


def outline(body: list[ast.stmt], within: str = "") -> Iterator[Definition]:
    for node in body:
        match node:
            case ast.ClassDef(name=name, bases=bases):
                yield Definition(within + name, bases=tuple(ast.unparse(base).rpartition(".")[2] for base in bases))
                yield from outline(node.body, f"{within}{name}.")
            case ast.FunctionDef(name=name, args=args):
                parameters = tuple(one.arg for one in (*args.args, *args.kwonlyargs))
                yield Definition(within + name, parameters, tuple(cases(node)))
            case ast.Assign(targets=[ast.Name(id=name)]) if not within:
                yield Definition(name, is_constant=True)


def cases(function: ast.FunctionDef) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in function.decorator_list:
        match node:
            case ast.Call(func=ast.Name(id="parametrize"), args=[ast.Constant(value=names), values]):
                yield names, tuple(map(ast.unparse, values.elts)) if isinstance(values, ast.List) else ()


def read(file: Path) -> dict[str, Definition]:
    return {one.name: one for one in outline(ast.parse(file.read_text()).body)}


def calls(file: Path) -> set[str]:
    """The calls of the module itself, with their first argument; not those under a condition."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[first, *_])):
                found.add(f"{name}({ast.unparse(first)})")
    return found


def header(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.startswith(HEADERS)]


class OutlinesTest(unittest.TestCase):
    def files(self) -> list[tuple[Path, Path]]:
        """Each outline, and the suite of ours with that name."""
        ours = [SUITES / path for path in sorted(PATHS)]
        return [(OUTLINES / file.name.removeprefix("test_"), file) for file in ours]

    def test_there_is_nothing_else_beside_the_property_suites(self) -> None:
        files = {file.relative_to(SUITES) for file in SUITES.rglob("*.py")}
        self.assertEqual({str(file) for file in files if file.parts[0] != "properties"}, PATHS)

    def test_the_header(self) -> None:
        for theirs, ours in self.files():
            with self.subTest(theirs.name):
                self.assertEqual(header(ours), header(theirs))
                self.assertTrue(ours.read_text().startswith(header(theirs)[0]))

    def test_names_and_parameters(self) -> None:
        for theirs, ours in self.files():
            with self.subTest(theirs.name):
                mine, left_out = read(ours), set()
                for name, definition in read(theirs).items():
                    if name not in mine:
                        left_out.add(name)
                        continue
                    left_out |= {f"{name}({one})" for one in definition.parameters if one not in mine[name].parameters}
                    for (names, values), (our_names, our_values) in zip(
                        definition.cases, mine[name].cases, strict=True
                    ):
                        self.assertEqual(our_names, names, name)
                        self.assertLessEqual(set(values), set(our_values), name)
                self.assertEqual(left_out, set(LEFT_OUT.get(theirs.name, {})))

    def test_the_bases(self) -> None:
        for theirs, ours in self.files():
            with self.subTest(theirs.name):
                mine = read(ours)
                others = {
                    name
                    for name, definition in read(theirs).items()
                    if name in mine and mine[name].bases != definition.bases
                }
                self.assertEqual(others, set(OTHER_BASES.get(theirs.name, {})))

    def test_the_calls_of_the_module(self) -> None:
        for theirs, ours in self.files():
            with self.subTest(theirs.name):
                self.assertEqual(calls(theirs) - calls(ours), set(OTHER_CALLS.get(theirs.name, {})))

    def test_the_newest_forms_are_there(self) -> None:
        """Beside the classes whose bases or calls are others."""
        fsdp = (SUITES / "fsdp/test_fsdp_tp_integration.py").read_text()
        self.assertRegex(fsdp, r"(?m)^class OnSharedRanks\(FSDPTestContinuous\):")
        self.assertIn('"TestTPFSDPIntegrationContinuous",\n    (OnSharedRanks,)', fsdp)
        examples = (SUITES / "tensor/parallel/test_tp_examples.py").read_text()
        self.assertRegex(examples, r"(?m)^instantiate_device_type_tests\(.*, except_for=\[.cpu.\], allow_xpu=True\)$")
        self.assertEqual(examples.count("    @skipXPUIf(True, "), 2)

    def test_the_order(self) -> None:
        for theirs, ours in self.files():
            with self.subTest(theirs.name):
                wanted, mine = read(theirs), read(ours)
                self.assertEqual([name for name in mine if name in wanted], [name for name in wanted if name in mine])
                for name, definition in wanted.items():
                    if name in mine:
                        own = [one for one in mine[name].parameters if one in definition.parameters]
                        self.assertEqual(own, [one for one in definition.parameters if one in own], name)

    def test_what_is_ours_comes_after_it(self) -> None:
        for theirs, ours in self.files():
            with self.subTest(theirs.name):
                wanted, mine = read(theirs), read(ours)
                first = [
                    name
                    for name, definition in mine.items()
                    if name not in wanted and not definition.is_constant and is_followed_by_theirs(name, mine, wanted)
                ]
                own = [name for name in first if not any(name.startswith(f"{other}.") for other in first)]
                self.assertEqual(own, FIRST.get(theirs.name, []))


def is_followed_by_theirs(name: str, mine: dict[str, Definition], wanted: dict[str, Definition]) -> bool:
    """Whether a definition that PyTorch's file has, too, comes after it in the same class or file."""
    names = list(mine)
    scope = name.rpartition(".")[0]
    return any(
        after in wanted and after.rpartition(".")[0] == scope and not mine[after].is_constant
        for after in names[names.index(name) :]
    )


if __name__ == "__main__":
    unittest.main()
