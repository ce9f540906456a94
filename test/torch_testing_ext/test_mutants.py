"""benchmarks/mutants.py and torch_changes.py change the package and torch, and find the tests that are near."""

import ast
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

import pytest

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "test" / "torch_testing_ext" / "_torch")]

import mutants  # noqa: E402
import mutations  # noqa: E402
import torch_changes  # noqa: E402
from mutants import PACKAGE  # noqa: E402

SOURCE = '''
"""A docstring."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

__all__ = ["f"]
LIMIT: int = 3  # é


def f(number: int = 4, name: "str" = "é") -> "bool":
    """Another one."""
    if number < LIMIT and name:
        print(f"{number + 1}")
    number += 1
    return not number
'''


class ChangesTest(unittest.TestCase):
    def lines(self):
        """Each changed line, without its indentation, by the kind of change."""
        changes = mutants.changes_of("a.py", SOURCE)
        return [(change.kind, change.lines(SOURCE.encode())[1]) for change in changes]

    def test_all_of_a_file(self):
        self.assertEqual(
            self.lines(),
            [
                ("constant", "LIMIT: int = 4  # é"),
                ("constant", """def f(number: int = 5, name: "str" = "é") -> "bool":"""),
                ("constant", """def f(number: int = 4, name: "str" = 'changed é') -> "bool":"""),
                ("condition", "if (not (number < LIMIT and name)):"),
                ("and, or", "if (number < LIMIT or name):"),
                ("comparison", "if (number <= LIMIT) and name:"),
                ("comparison", "if (number >= LIMIT) and name:"),
                ("statement", "pass"),
                ("statement", "pass"),
                ("constant", "number += 2"),
                ("return", "return None"),
                ("condition", "return (number)"),
            ],
        )

    def test_each_is_another_program(self):
        before = ast.dump(ast.parse(SOURCE))
        for change in mutants.changes_of("a.py", SOURCE):
            with self.subTest(change):
                self.assertNotEqual(ast.dump(ast.parse(change.apply(SOURCE.encode()))), before)

    @pytest.mark.slow
    def test_the_package(self):
        """Every room has its lines, each line is chosen once, and every change is a program."""
        chosen = mutants.choose(ROOT, seed=3, count=60)
        self.assertEqual(len({(change.file, change.line) for change in chosen}), 60)
        for room in {mutants.room_of(path.relative_to(ROOT).as_posix()) for path in (ROOT / PACKAGE).rglob("*.py")}:
            with self.subTest(room):
                count = sum(mutants.room_of(change.file) == room for change in chosen)
                self.assertGreaterEqual(count, mutants.LINES_PER_ROOM)
        for change in chosen:
            ast.parse(change.apply((ROOT / change.file).read_bytes()))

    def test_a_seed_chooses(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / PACKAGE).mkdir()
            (Path(folder) / PACKAGE / "a.py").write_text("\n".join(f"A = {number}" for number in range(100)))
            first, same, other = (mutants.choose(Path(folder), seed, 20) for seed in (1, 1, 2))
        self.assertEqual(first, same)
        self.assertNotEqual(first, other)


class TestsOfModulesTest(unittest.TestCase):
    def test_nearest_first(self):
        files = {
            f"{PACKAGE}/room/thing.py": "",
            f"{PACKAGE}/room/user.py": "from .thing import x",
            f"test/{PACKAGE}/room/test_other.py": "",
            f"test/{PACKAGE}/room/test_thing.py": "",
            f"test/{PACKAGE}/test_far.py": f"from {PACKAGE}.room import thing",
            f"test/{PACKAGE}/test_named.py": f"NAME = '{PACKAGE}.room.thing.x'",
            f"test/{PACKAGE}/test_of_user.py": f"import {PACKAGE}.room.user",
            f"test/{PACKAGE}/test_unrelated.py": "",
        }
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            tests = mutants.TestMap(Path(folder))
            chosen = [tests.files(f"{PACKAGE}/room/thing.py", most) for most in (100, 2)]
        names, some = ([Path(name).stem for name in files] for files in chosen)
        self.assertEqual(names, ["test_thing", "test_far", "test_named", "test_other", "test_of_user"])
        self.assertEqual(some, ["test_thing", "test_far"])


class SummaryTest(unittest.TestCase):
    def test_summary(self):
        row = "{}\troom\ta.py:1\tconstant\tx = 1\tx = 2\t{}\ttest_a\t1\t{}\ttest_b\t1"
        outcomes = (("noticed", ""), ("not noticed", "noticed"), ("not noticed", "not noticed"), ("noticed", ""))
        rows = [row.format(number, *outcome) for number, outcome in enumerate(outcomes)]
        expected = """\
            4 changes: 2 noticed without slow tests, 1 more by slow ones, 1 by neither
            67% of what any test notices is noticed without slow ones
            only slow: a.py:1 (constant): `x = 1` -> `x = 2`, noticed by test_b"""
        self.assertEqual(list(mutants.summary(rows)), textwrap.dedent(expected).splitlines())


class ChangesOfTorchTest(unittest.TestCase):
    def test_each_contract_has_its_nearest_tests(self):
        contracts = {contract for _, contract, _ in mutations.MUTATIONS.values()}
        self.assertEqual({*torch_changes.NEAREST}, contracts)
        for name in {name for names in torch_changes.NEAREST.values() for name in names}:
            self.assertTrue((ROOT / "test" / PACKAGE / name).exists(), name)


if __name__ == "__main__":
    unittest.main()
