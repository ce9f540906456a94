"""What an import of the package loads, which module may import which, and how modules and classes are named."""

import ast
import functools
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
from kit.files import subject
from kit.sources import (
    LONGEST_SENTENCE,
    ROW_OF,
    absolute_imports,
    cycles,
    fault_of_docstring,
    folder_of,
    imports_in,
    modules_below,
    poor_docstrings,
    shadowing_modules,
    shared_class_names,
)

import torch_testing_ext
from torch_testing_ext.common_utils import run_tests

PACKAGE = Path(torch_testing_ext.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# The parts that could be products of their own. Each has doors: the modules that the rest may import, and nothing else.
DOORS = {
    # The compiler, whose door is that of the mirror.
    ("_spmd", "distributed._spmd"): {"distributed._spmd"},
    ("runner.cluster",): {"runner.cluster.cluster_site"},
    # The stand-ins for other projects, which the rest does not know.
    ("compat",): set(),
    # What moves tests, to here and back.
    ("upstream", "moving"): {"upstream.drop_in", "moving"},
}
MIRROR_MODULES = ["common_utils", "common_distributed", "distributed.fake_pg"]

_FOLDER = Path(__file__).parent
TESTS = sorted(file for file in _FOLDER.rglob("*.py") if "kit" not in file.relative_to(_FOLDER).parts[:-1])

PROBE = subject(__file__, "imports_probe.py")


def states_after_importing(first, *others):
    """What a new interpreter holds that has imported the modules `first`, after it has imported each of `others`."""
    words = [str(PACKAGE.parent), json.dumps([first, *others])]
    done = subprocess.run([sys.executable, "-c", PROBE, *words], stdout=subprocess.PIPE, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(others)
    return found


def state_after_importing(*names):
    """What a new interpreter holds after it has imported these modules."""
    return states_after_importing((), names)[0]


def states_of_the_mirror():
    """What an interpreter holds that has imported torch, and then each module of the mirror; last, all of them."""
    ours = [f"torch_testing_ext.{name}" for name in MIRROR_MODULES]
    found = states_after_importing(("torch", "torch.distributed"), (), *([name] for name in ours), ours)
    return dict(zip(("torch alone", *MIRROR_MODULES, "all"), found, strict=True))


def within(package, modules):
    """Those of `modules` that are the package or part of it."""
    return [name for name in modules if name == package or name.startswith(package + ".")]


def runner_folder_of(module):
    """`report` for torch_testing_ext.runner.report.console; empty for modules outside the runner's folders."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["runner"] and len(parts) > 2 else ""


def imports_past_doors(imports, part, doors):
    """The imports by which others enter a part of the package, given by its folders, past its doors."""

    def is_inside(module):
        return any(within(folder, [module]) for folder in part)

    entered = []
    for module, found in imports.items():
        for imported, line in found:
            name = imported.removeprefix(f"{PACKAGE.name}.")
            importer = module.removeprefix(f"{PACKAGE.name}.")
            if is_inside(name) and not is_inside(importer) and name not in doors:
                entered.append(f"{importer}:{line} imports {name}")
    return entered


MODULES = modules_below(PACKAGE)
TEXTS = {module: file.read_text() for module, file in MODULES.items()}


@functools.cache
def all_imports() -> dict[str, list[tuple[str, int]]]:
    """The imports of each module: not read while tests are collected, which every worker does."""
    return {module: list(imports_in(module, file, MODULES)) for module, file in MODULES.items()}


class TestImporting(unittest.TestCase):
    def test_the_package_imports_no_torch(self):
        found = state_after_importing("torch_testing_ext")
        self.assertEqual(within("torch", found["modules"]), [])

    def test_launch_imports_no_torch(self):
        found = state_after_importing("torch_testing_ext.launch")
        self.assertEqual(within("torch", found["modules"]), [])

    def test_the_runner_imports_no_torch(self):
        """Other processes than the user's import the test files."""
        found = state_after_importing(
            *(f"torch_testing_ext.runner.{name}" for name in ("cli", "run_session", "engine.engine", "report"))
        )
        self.assertEqual(within("torch", found["modules"]), [])


class TestImportingTheMirror(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.states = states_of_the_mirror()

    def test_the_mirror(self):
        torch_alone = self.states["torch alone"]
        for name in MIRROR_MODULES:
            with self.subTest(module=name):
                found = self.states[name]
                self.assertEqual(found["initialised"], [])
                self.assertLessEqual(found["threads"], torch_alone["threads"])
                for heavy in ("torch.testing._internal", "torch._dynamo", "torch._inductor"):
                    new = set(within(heavy, found["modules"])) - set(within(heavy, torch_alone["modules"]))
                    self.assertEqual(new, set())

    def test_the_mirror_adds_little_to_torch(self):
        """Every test file pays for each module that the mirror imports."""
        torch_alone, ours = self.states["torch alone"], self.states["common_distributed"]
        new = set(within("torch", ours["modules"])) - set(torch_alone["modules"])
        self.assertEqual(new, set())

    def test_the_mirror_imports_nothing_that_only_some_tests_need(self):
        """Ranks that fail, hang, are sanitized, persist or are threads: the first of them pays."""
        later = (
            "_collectives.findings.finding",
            "_collectives.proof.proof_of_hang",
            "_collectives.sanitizer.sanitizer_log",
            "_testing.bases.threaded_group",
        )
        of_launch = ("hang", "judging", "persistent_ranks", "probes", "launched.coordinator")
        later += tuple(f"launch.{name}" for name in of_launch)
        names = {f"torch_testing_ext.{name}" for name in later}
        self.assertEqual(names - set(MODULES), set())
        found = self.states["all"]
        self.assertIn("torch_testing_ext.distributed.fake_pg", found["modules"])
        self.assertEqual(names & set(found["modules"]), set())


class TestSources(unittest.TestCase):
    def test_sources_are_found(self):
        self.assertGreater(len(SOURCES), 20)

    @pytest.mark.slow
    def test_no_module_imports_torchs_own_test_kit(self):
        for file in SOURCES:
            for module, line in absolute_imports(file.read_text()):
                self.assertFalse(within("torch.testing._internal", [module]), f"{file}:{line} imports {module}")

    def test_planted_imports_are_found(self):
        self.assertEqual(
            list(absolute_imports("def f():\n    from torch.testing import _internal\n")),
            [("torch.testing._internal", 2)],
        )


class TestLayers(unittest.TestCase):
    """A module imports its own row of house.md and the rows below it, and no two modules import each other."""

    def test_no_module_imports_a_higher_row(self):
        upward = {
            (module, imported)
            for module, found in all_imports().items()
            for imported, _ in found
            if ROW_OF[folder_of(imported)] > ROW_OF[folder_of(module)]
        }
        self.assertEqual(upward, set())

    def test_there_are_no_cycles(self):
        graph = {module: sorted({imported for imported, _ in found}) for module, found in all_imports().items()}
        self.assertEqual(cycles(graph), [])

    def test_folders_of_the_runner(self):
        """Engines and reporters share only events; what decides what to run knows neither, nor any process."""
        forbidden = {
            "options": {"processes", "engine", "report"},
            "scheduling": {"processes", "engine", "report"},
            "engine": {"report"},
            "report": {"processes", "engine"},
        }
        seen, wrong = set(), set()
        for module, found in all_imports().items():
            folder = runner_folder_of(module)
            seen.add(folder)
            for imported, _ in found:
                if runner_folder_of(imported) in forbidden.get(folder, ()):
                    wrong.add((module, imported))
        self.assertLessEqual({*forbidden, "processes"}, seen)
        self.assertEqual(wrong, set())

    def test_every_kind_of_import_is_found(self):
        known = {"p", "p.a", "p.a.x", "p.b", "p.c", "p.d"}
        source = "from . import x\ndef f():\n    from ..b import name\n    import p.c\nimport_module('p.d')\n"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "y.py")
            file.write_text(source)
            found = list(imports_in("p.a.y", file, known))
        self.assertEqual(sorted(found), [("p.a.x", 1), ("p.b", 3), ("p.c", 4), ("p.d", 5)])

    def test_cycles_are_found(self):
        graph = {"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}
        self.assertEqual(cycles(graph), [["a", "b", "c"]])


class TestBoundaries(unittest.TestCase):
    """Which folders may import which, beyond the rows."""

    def test_launch_imports_no_mirror_and_no_test_framework(self):
        for file in (PACKAGE / "launch").glob("*.py"):
            for module, line in absolute_imports(file.read_text()):
                where = f"{file.name}:{line} imports {module}"
                self.assertNotIn(module.partition(".")[0], ("unittest", "pytest", "torch"), where)
        for module, found in all_imports().items():
            if folder_of(module) == "launch":
                folders = {folder_of(imported) for imported, _ in found}
                self.assertLessEqual(
                    folders, {"faults", "_torch", "_process", "_tests", "_collectives", "_machine", "launch"}, module
                )

    @pytest.mark.slow
    def test_upstream_stands_alone(self):
        """It imports the launch and no torch; of the rest, only the plugin and the runner, which start a drop-in run,
        and the converter of others' tests import it. It names the modules of the mirror as strings."""
        allowed = {
            "torch_testing_ext._testing.bases.invocation",
            "torch_testing_ext._process",
            "torch_testing_ext._tests",
            "torch_testing_ext.launch",
        }
        for file in SOURCES:
            inside = PACKAGE / "upstream" in file.parents
            importers = {PACKAGE / "runner"}
            starts_drop_in = file.name in ("pytest_plugin.py", "moving.py") or not importers.isdisjoint(file.parents)
            for module, line in absolute_imports(file.read_text()):
                where = f"{file.name}:{line} imports {module}"
                if inside and module.startswith("torch_testing_ext"):
                    self.assertTrue(any(within(each, [module]) for each in allowed), where)
                if not inside and not starts_drop_in:
                    self.assertEqual(within("torch_testing_ext.upstream", [module]), [], where)
                if inside:
                    self.assertNotEqual(module.partition(".")[0], "torch", where)

    def test_parts_are_entered_by_their_doors(self):
        """So each can be read, changed or left out alone."""
        for part, doors in DOORS.items():
            with self.subTest(part=part):
                known = {module.removeprefix(f"{PACKAGE.name}.") for module in MODULES}
                self.assertLessEqual(doors, known)
                self.assertEqual(imports_past_doors(all_imports(), part, doors), [])

    def test_imports_past_a_door_are_found(self):
        graph = {
            "shop": [("part.door", 1), ("part.inner", 2)],
            "part.door": [("part.inner", 3)],
            "party": [("part", 4)],
        }
        self.assertEqual(
            imports_past_doors(graph, ("part",), {"part.door"}),
            ["shop:2 imports part.inner", "party:4 imports part"],
        )

    def test_only_the_runner_imports_the_runner(self):
        for file in SOURCES:
            if PACKAGE / "runner" not in file.parents and file != PACKAGE / "__main__.py":
                found = within("torch_testing_ext.runner", [module for module, _ in absolute_imports(file.read_text())])
                self.assertEqual(found, [], file)


class TestNames(unittest.TestCase):
    @pytest.mark.slow
    def test_modules_that_run_do_so_at_their_end(self):
        """What is defined below `if __name__ == "__main__"` would not be there."""
        for path in SOURCES:
            statements = ast.parse(path.read_text()).body
            calls = [each for each in statements if isinstance(each, ast.If) and "__name__" in ast.unparse(each.test)]
            self.assertEqual(calls, statements[len(statements) - len(calls) :], path)

    def test_no_two_public_classes_share_a_name(self):
        self.assertEqual(shared_class_names(TEXTS), {})

    def test_no_module_shadows_the_standard_library(self):
        self.assertEqual(shadowing_modules(MODULES, sys.stdlib_module_names), [])

    def test_shared_names_are_found(self):
        sources = {
            "p.a": "class Shared: ...\nclass _Private: ...\nclass Own: ...\n",
            "p.b": "if x:\n    class Shared: ...\nelse:\n    class Shared: ...\nclass _Private: ...\n",
            "p.c": "class Outer:\n    class Own: ...\ndef f():\n    class Shared: ...\n",
            "p.d": "try:\n    from p.a import Own\nexcept ImportError:\n    class Own: ...\n",
        }
        self.assertEqual(shared_class_names(sources), {"Shared": ["p.a", "p.b"], "Own": ["p.a", "p.d"]})

    def test_alternatives_in_one_module_are_one_class(self):
        source = "if x:\n    class Only: ...\nelse:\n    class Only: ...\n"
        self.assertEqual(shared_class_names({"p.a": source}), {})

    def test_shadowing_modules_are_found(self):
        modules = ["p", "p.runner.select", "p.runner.selecting", "p.runner.io", "p.runner.io.x", "p.distributed.code"]
        known = {"select", "io", "code", "p.runner"}
        self.assertEqual(shadowing_modules(modules, known), ["p.runner.select", "p.runner.io"])


class TestDocstrings(unittest.TestCase):
    """The first line of a docstring says what the module or the public class is, in one sentence."""

    def test_every_module_and_public_class_has_one(self):
        poor = {name: fault for module, text in TEXTS.items() for name, fault in poor_docstrings(module, text).items()}
        self.assertEqual(poor, {}, "\n" + "\n".join(f"{name}: {fault}" for name, fault in poor.items()))

    def test_poor_docstrings_are_found(self):
        source = '"""A module."""\nclass Bare: ...\nclass Wrapped:\n    """Spread over\n    two lines."""\n'
        source += "class Good:\n    'Something.'\n    class Inner: ...\nclass _Private: ...\ndef f(): ...\n"
        found = poor_docstrings("p.a", source)
        self.assertEqual(list(found), ["p.a.Bare", "p.a.Wrapped"])
        self.assertEqual(found["p.a.Bare"], "no docstring")
        self.assertIn("'Spread over'", found["p.a.Wrapped"])
        self.assertEqual(poor_docstrings("p.b", "import sys\n"), {"p.b": "no docstring"})

    def test_what_a_first_line_must_be(self):
        longest = "x" * (LONGEST_SENTENCE - 1) + "."
        for good in ("One.", "One.\n\nMore, without an end", "\n    One.\n    ", longest):
            with self.subTest(docstring=good):
                self.assertIsNone(fault_of_docstring(good))
        wrong = {
            None: "no docstring",
            "": "no docstring",
            " \n ": "no docstring",
            "One": "full stop",
            "One:\nmore.": "full stop",
            "x" + longest: "121 characters",
        }
        for docstring, fault in wrong.items():
            with self.subTest(docstring=docstring):
                self.assertIn(fault, fault_of_docstring(docstring))


def imported_tests(source, names):
    """The modules of `names` that a source imports, each with the line."""
    heads = ((module.partition(".")[0], line) for module, line in absolute_imports(source))
    return [(name, line) for name, line in heads if name in names]


class TestTests(unittest.TestCase):
    """Tests do not import tests: what several need is in the kit, or in a module beside them that is no test."""

    @pytest.mark.slow
    def test_no_test_imports_another(self):
        names = {file.stem for file in TESTS if file.name.startswith("test_")}
        self.assertGreater(len(names), 200)
        found = [
            f"{file}:{line} imports {name}"
            for file in TESTS
            for name, line in imported_tests(file.read_text(encoding="utf-8"), names)
        ]
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_planted_imports_are_found(self):
        source = "import os\nfrom test_console import printed\ndef f():\n    import test_console, console\n"
        self.assertEqual(imported_tests(source, {"test_console"}), [("test_console", 2), ("test_console", 4)])


if __name__ == "__main__":
    run_tests()
