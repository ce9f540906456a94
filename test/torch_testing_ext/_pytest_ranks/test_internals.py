"""Private names of pytest: each works in the version that is installed, and only one package names them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from kit.files import subject
from kit.pytest_runs import PACKAGE, PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

INTERNALS = PACKAGE / "_pytest_ranks" / "pytest_internals"
SOURCE = "\n".join(file.read_text() for file in INTERNALS.glob("*.py"))
SMOKE = subject(__file__, "uses_of_pytest_internals.py")
MODEL = {
    **dict.fromkeys(["test_fixtures[1]", "test_added_fixtures", "test_finalizers", "test_finalizers_were_called"]),
    **dict.fromkeys(
        [
            "XunitTest.test_unittest",
            "TestXunit.test_of_pytest",
            "test_texts",
            "test_options",
            "test_colours",
            "test_debugger",
            "test_failure_text",
            "test_fixtures_of_a_module",
            "test_settings",
            "test_property_of_the_run",
        ]
    ),
    **dict.fromkeys(["test_output", "test_sessions", "test_shared_set_up", "test_odd_folders", "test_ways_to_a_file"]),
}


def private_names(source: str) -> set[str]:
    """The private names that pytest_internals takes from pytest: attributes, imported names and their texts."""
    found, imported = set(), set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                found.add(name)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("_pytest"):
                imported.update(alias.name for alias in names)
    named = {name for name in found if name.isidentifier() and name.startswith("_") and not name.startswith("__")}
    return named | imported


def uses(source: str, private: set[str]) -> Iterator[str]:
    """The private names of pytest in the source of another module. Attributes of `self` are the module's own."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "_pytest":
                yield f"from {module}"
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] == "_pytest")
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) if name in private:
                yield name
            case ast.Constant(value=str(text)) if text.startswith("_pytest."):
                yield text


class InternalsTest(PytestCase):
    def test_each_name_works_in_this_version(self) -> None:
        run = run_pytest({"test_smoke.py": SMOKE})
        expected = {**dict.fromkeys(MODEL, "passed"), "test_xfail": "xfail", "test_reports": "skipped"}
        self.assertOutcomes(run, expected)
        self.assertIn("test_smoke.py:", run.messages["test_reports"])

    def test_the_smoke_file_tries_every_function(self) -> None:
        functions = {node.name for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef)}
        self.assertGreater(len(functions), 20)
        tried = {node.attr for node in ast.walk(ast.parse(SMOKE)) if isinstance(node, ast.Attribute)}
        self.assertEqual(functions - tried, set())

    @pytest.mark.slow
    def test_no_other_module_names_them(self) -> None:
        private = private_names(SOURCE)
        self.assertLessEqual({"_setupstate", "_excinfo", "_do_configure"}, private)
        found = {}
        for file in PACKAGE.rglob("*.py"):
            if file.parent != INTERNALS and (names := sorted(set(uses(file.read_text(), private)))):
                found[str(file.relative_to(PACKAGE))] = names
        self.assertEqual(found, {})

    def test_planted_names_are_found(self) -> None:
        private = {"_setupstate", "_excinfo"}
        source = 'from _pytest.config import Config\nitem._setupstate\nself._excinfo\ngetattr(item, "_excinfo")\n'
        self.assertEqual(list(uses(source, private)), ["from _pytest.config", "_setupstate", "_excinfo"])


if __name__ == "__main__":
    run_tests()
