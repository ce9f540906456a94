"""What importing us brings along, and who may import what."""

import ast
import functools
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from imports_support import ROW_OF, circles, folder_of, imports_in, modules_below

import torch_testing_ext
from torch_testing_ext.common_utils import run_tests

PACKAGE = Path(torch_testing_ext.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# What PyTorch's own suites and models use by these names, and the operators that a traced program consists of.
# Nothing else, and nothing new.
KNOWN_PRIVATE_NAMES = {
    "_fsdp/fully_shard_models.py": {"torch.distributed._composable"},
    "_spmd/lower/buckets.py": {"torch.ops._c10d_functional"},
    "_spmd/lower/cleaning.py": {"torch._ops"},
    "_spmd/lower/emit.py": {"torch._ops"},
    "_spmd/lower/graphs.py": {"torch._ops"},
    "_spmd/lower/lowering.py": {"torch.ops._c10d_functional"},
    "_spmd/lower/shard_flow.py": {"torch._ops", "torch.ops._c10d_functional"},
    "_dtensor/converter.py": {"torch.utils._pytree"},
    "_dtensor/op_checks.py": {"torch.utils._pytree"},
    "_dtensor/sharding_rules.py": {"torch.utils._pytree"},
    "upstream/mapping.py": {
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed._spmd",
        "torch.testing._internal",
    },
}
MIRROR = ["common_utils", "common_distributed", "distributed.fake_pg"]

LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    __import__(name)
torch = sys.modules.get("torch")
print(json.dumps({
    "modules": sorted(sys.modules),
    "initialised": [name for name in ("cuda", "xpu") if torch and getattr(torch, name).is_initialized()],
    "threads": len(__import__("os").listdir("/proc/self/task")) if sys.platform == "linux" else 1,
}))
"""


@functools.cache
def importing(*names):
    """What a new interpreter has after importing these."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(PACKAGE.parent), *names], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def below(package, modules):
    return [name for name in modules if name == package or name.startswith(package + ".")]


def imports_of(source):
    """Each module that a source file imports, wherever in it, with the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def code_of(source):
    """The source without comments and docstrings: names in prose are nobody's dependency."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            first.value = ast.Constant(...)
    return ast.unparse(tree)


def runner_folder_of(module):
    """`report` for torch_testing_ext.runner.report.text; empty for modules outside the runner's folders."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["runner"] and len(parts) > 2 else ""


MODULES = modules_below(PACKAGE)
IMPORTS = {module: list(imports_in(module, file, MODULES)) for module, file in MODULES.items()}


class TestImporting(unittest.TestCase):
    def test_the_package_imports_no_torch(self):
        found = importing("torch_testing_ext")
        self.assertEqual(below("torch", found["modules"]), [])

    def test_launch_imports_no_torch(self):
        found = importing("torch_testing_ext.launch")
        self.assertEqual(below("torch", found["modules"]), [])

    def test_the_runner_imports_no_torch(self):
        """In the process that the user started; test files are imported by others."""
        found = importing(
            *(f"torch_testing_ext.runner.{name}" for name in ("cli", "session", "engine.local", "report"))
        )
        self.assertEqual(below("torch", found["modules"]), [])

    def test_the_mirror(self):
        bare = importing("torch", "torch.distributed")
        for name in MIRROR:
            with self.subTest(module=name):
                found = importing(f"torch_testing_ext.{name}")
                self.assertEqual(found["initialised"], [])
                self.assertLessEqual(found["threads"], bare["threads"])
                for heavy in ("torch.testing._internal", "torch._dynamo", "torch._inductor"):
                    new = set(below(heavy, found["modules"])) - set(below(heavy, bare["modules"]))
                    self.assertEqual(new, set())

    def test_what_the_mirror_adds_to_torch_is_little(self):
        """Each module imported is time that every test file pays."""
        bare, ours = importing("torch", "torch.distributed"), importing("torch_testing_ext.common_distributed")
        new = set(below("torch", ours["modules"])) - set(bare["modules"])
        self.assertEqual(new, set())


class TestSources(unittest.TestCase):
    def test_there_are_some(self):
        self.assertGreater(len(SOURCES), 20)

    def test_nobody_imports_torchs_own_test_kit(self):
        for file in SOURCES:
            for module, line in imports_of(file.read_text()):
                self.assertFalse(below("torch.testing._internal", [module]), f"{file}:{line} imports {module}")

    def test_private_names_of_torch_are_in_one_room(self):
        """So that a new version of torch is met there and nowhere else."""
        private = re.compile(r"\b(torch|dist|c10d)(\.\w+)*\._[A-Za-z]\w*")
        found: dict[str, set[str]] = {}
        for file in SOURCES:
            if PACKAGE / "_torch" not in file.parents:
                for match in private.finditer(code_of(file.read_text())):
                    found.setdefault(str(file.relative_to(PACKAGE)), set()).add(match.group())
        self.assertEqual(found, KNOWN_PRIVATE_NAMES)

    def test_what_is_looked_for_would_be_found(self):
        source = '"""torch._C in prose."""\nimport torch  # torch._C too\ntorch._C._log_api_usage_once("x")\n'
        self.assertEqual(re.findall(r"torch\._[A-Za-z]", code_of(source)), ["torch._C"])
        self.assertEqual(
            list(imports_of("def f():\n    from torch.testing import _internal\n")), [("torch.testing._internal", 2)]
        )


class TestLayers(unittest.TestCase):
    """The rows of the house: a module imports its own row and those below it, and no two modules import each other."""

    def test_no_module_imports_a_higher_row(self):
        upward = {
            (module, imported)
            for module, found in IMPORTS.items()
            for imported, _ in found
            if ROW_OF[folder_of(imported)] > ROW_OF[folder_of(module)]
        }
        self.assertEqual(upward, set())

    def test_there_are_no_circles(self):
        graph = {module: sorted({imported for imported, _ in found}) for module, found in IMPORTS.items()}
        self.assertEqual(circles(graph), [])

    def test_folders_of_the_runner(self):
        """Engines and reporters share only events; what decides what to run knows neither, nor any process."""
        forbidden = {
            "options": {"processes", "engine", "report"},
            "selection": {"processes", "engine", "report"},
            "scheduling": {"processes", "engine", "report"},
            "engine": {"report"},
            "report": {"processes", "engine"},
        }
        seen, wrong = set(), set()
        for module, found in IMPORTS.items():
            folder = runner_folder_of(module)
            seen.add(folder)
            for imported, _ in found:
                if runner_folder_of(imported) in forbidden.get(folder, ()):
                    wrong.add((module, imported))
        self.assertLessEqual({*forbidden, "processes"}, seen)
        self.assertEqual(wrong, set())

    def test_every_kind_of_import_is_seen(self):
        known = {"p", "p.a", "p.a.x", "p.b", "p.c", "p.d"}
        source = "from . import x\ndef f():\n    from ..b import name\n    import p.c\nimport_module('p.d')\n"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "y.py")
            file.write_text(source)
            found = list(imports_in("p.a.y", file, known))
        self.assertEqual(sorted(found), [("p.a.x", 1), ("p.b", 3), ("p.c", 4), ("p.d", 5)])

    def test_circles_are_found(self):
        graph = {"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}
        self.assertEqual(circles(graph), [["a", "b", "c"]])


class TestRooms(unittest.TestCase):
    """Who may know whom."""

    def test_launch_knows_no_mirror_and_no_test_framework(self):
        for file in (PACKAGE / "launch").glob("*.py"):
            for module, line in imports_of(file.read_text()):
                where = f"{file.name}:{line} imports {module}"
                self.assertNotIn(module.partition(".")[0], ("unittest", "pytest", "torch"), where)
        for module, found in IMPORTS.items():
            if folder_of(module) == "launch":
                folders = {folder_of(imported) for imported, _ in found}
                self.assertLessEqual(folders, {"_torch", "_process", "_machine", "launch"}, module)

    def test_upstream_stands_alone(self):
        """It knows the launch, only the two doors to a drop-in run know it, and it imports the mirror by name alone."""
        allowed = {"torch_testing_ext._cases.invocation", "torch_testing_ext.launch"}
        for file in SOURCES:
            inside = PACKAGE / "upstream" in file.parents
            door = file.name == "pytest_plugin.py" or PACKAGE / "runner" in file.parents
            for module, line in imports_of(file.read_text()):
                where = f"{file.name}:{line} imports {module}"
                if inside and module.startswith("torch_testing_ext"):
                    self.assertTrue(any(below(each, [module]) for each in allowed), where)
                if not inside and not door:
                    self.assertEqual(below("torch_testing_ext.upstream", [module]), [], where)
                if inside:
                    self.assertNotEqual(module.partition(".")[0], "torch", where)

    def test_nobody_imports_the_runner(self):
        for file in SOURCES:
            if PACKAGE / "runner" not in file.parents:
                found = below("torch_testing_ext.runner", [module for module, _ in imports_of(file.read_text())])
                self.assertEqual(found, [], file)


if __name__ == "__main__":
    run_tests()
