"""The pages of docs/migrate: every example runs, before in the framework's way and after in ours.

`frameworks/` has what the examples need of the frameworks themselves, `harness/` their ways of starting ranks, both in
miniature. After-examples run a second time with a wrong number in them, and must fail then.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import torch_testing_ext
from torch_testing_ext.common_utils import run_tests

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
# Other pages have no example: the command does it all.
PAGES = sorted(page for page in (ROOT / "docs" / "migrate").glob("*.md") if "# before: " in page.read_text())
PLUGIN = "torch_testing_ext.pytest_plugin"
BLOCK = re.compile(r"^```python\n# (before|after): (\w+\.py)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONGEST_PAGE = 43
# How the frameworks run their tests: several in one run of pytest, under a launcher, or by a launcher in a test.
IN_PYTEST = ("vllm", "flashinfer", "deepspeed", "lightning")
LAUNCHED = ("megatron",)
IN_TESTS = ("transformer_engine", "accelerate")
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PYTEST_", "TORCH_TESTING_EXT_", "PL_")


def files_of(page: Path, when: str) -> dict[str, str]:
    """The files of a page, by name, before or after."""
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for kind, name, how, code in BLOCK.findall(page.read_text()):
        if kind == "before":
            before[name] = code
        else:
            after[name] = merged(before[name], code, how) if is_change(how) else code
    scripts = {name: code for name, code in before.items() if name not in ("test_sum.py", "conftest.py")}
    return before if when == "before" else {**scripts, **after}


def is_change(how: str) -> bool:
    """Does a page show only a change of the file?"""
    return "only the lines that change" in how or "the same" in how


def merged(before: str, change: str, how: str) -> str:
    """The file before, with the definitions of `change`; `how` may name functions to leave out."""
    left_out = set(re.findall(r"(?:without|and) (\w+)(?=[ )])", how))
    new = ast.parse(change).body
    names = {each.name for each in new if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
    kept: list[ast.stmt] = []
    for old in ast.parse(before).body:
        if isinstance(old, ast.ImportFrom) and not is_there(old.module or ""):
            continue
        if isinstance(old, ast.ClassDef) and old.name in names:
            (other,) = (each for each in new if isinstance(each, ast.ClassDef) and each.name == old.name)
            replaced = {each.name for each in other.body if isinstance(each, ast.FunctionDef)} | left_out
            other.body += [each for each in old.body if getattr(each, "name", "") not in replaced]
        elif getattr(old, "name", "") not in names | left_out:
            kept.append(old)
    imports = [each for each in new if isinstance(each, (ast.Import, ast.ImportFrom))]
    return ast.unparse(ast.Module([*imports, *kept, *(each for each in new if each not in imports)], []))


def is_there(module: str) -> bool:
    """Is there such a module without the frameworks' harnesses?"""
    parts = module.split(".")
    return not (HERE / "harness" / parts[0]).exists() and not (HERE / "harness" / f"{parts[0]}.py").exists()


def environment(*more: Path, **variables: str) -> dict[str, str]:
    """That of this process without what a run of our own tests may have set."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    path = os.pathsep.join(map(str, [ROOT, HERE / "frameworks", *more]))
    return {**clean, "PYTHONPATH": path, **variables}


def write(files: dict[str, str], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, code in files.items():
        Path(folder, name).write_text(code)


class MovingTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def run_python(self, environ: dict[str, str], *words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=300)
        return done.stdout + done.stderr

    def options(self) -> list[str]:
        words = ["-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={self.folder}", "-c", os.devnull]
        return [*words, "-o", "junit_family=xunit1"]

    def outcomes(self, report: str, text: str) -> dict[str, Counter[str]]:
        """How many tests of each folder passed, failed and skipped."""
        found: dict[str, Counter[str]] = {}
        self.assertTrue(Path(self.folder, report).exists(), text)
        for case in ElementTree.parse(self.folder / report).iter("testcase"):
            folder = str(case.get("file")).split("/")[-2]
            kinds = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
            found.setdefault(folder, Counter())[kinds[0] if kinds else "passed"] += 1
        return found

    def test_pages_are_short_and_complete(self) -> None:
        self.assertEqual(sorted(page.stem for page in PAGES), sorted((*IN_PYTEST, *LAUNCHED, *IN_TESTS)))
        for page in PAGES:
            with self.subTest(page=page.name):
                self.assertLessEqual(len(page.read_text().splitlines()), LONGEST_PAGE)
                self.assertEqual(page.read_text().count("```python\n"), len(BLOCK.findall(page.read_text())))
                for when in ("before", "after"):
                    self.assertIn("test_sum.py", files_of(page, when))
                self.assertNotIn("harness", files_of(page, "after")["test_sum.py"])

    def test_after(self) -> None:
        expected = {}
        for page in PAGES:
            files = files_of(page, "after")
            write(files, self.folder / f"right_{page.stem}")
            if page.stem == "lightning":  # one more interpreter would cost more than it shows
                expected["right_lightning"] = Counter(passed=1)
                continue
            wrong = {name: re.sub(r"\b3\.0", "4.0", code) for name, code in files.items()}
            self.assertNotEqual(wrong, files, page.name)
            write(wrong, self.folder / f"wrong_{page.stem}")
            expected[f"right_{page.stem}"] = Counter(passed=1)
            expected[f"wrong_{page.stem}"] = Counter(failure=1)
        text = self.run_python(environment(), "-m", "pytest", *self.options(), "-p", PLUGIN, "--junitxml=after.xml")
        self.assertEqual(self.outcomes("after.xml", text), expected, text)

    def test_before(self) -> None:
        for page in PAGES:
            write(files_of(page, "before"), self.folder / f"of_{page.stem}")
        options = [*self.options(), "-p", f"no:{PLUGIN}"]
        runs: list[Any] = [("in_pytest", 1, [*options, "-p", "unit.common", *(f"of_{page}" for page in IN_PYTEST)])]
        runs += [(page, 2, [*options, f"of_{page}"]) for page in LAUNCHED]
        environ = environment(HERE / "harness", PL_RUN_STANDALONE_TESTS="1")
        text = self.run_python(environ, str(HERE / "harness" / "launcher_in_miniature.py"), json.dumps(runs))
        passed = {f"of_{page}": Counter(passed=1) for page in IN_PYTEST}
        self.assertEqual(self.outcomes("in_pytest0.xml", text), passed, text)
        for page in LAUNCHED:
            for rank in range(2):
                self.assertEqual(self.outcomes(f"{page}{rank}.xml", text), {f"of_{page}": Counter(passed=1)}, text)

    @unittest.skipUnless(os.environ.get("MOVING_WITH_TORCHRUN"), "slow; MOVING_WITH_TORCHRUN=1 runs it")
    def test_before_with_torchrun_in_tests(self) -> None:
        for page in PAGES:
            if page.stem in IN_TESTS:
                write(files_of(page, "before"), self.folder / f"of_{page.stem}")
        words = [*self.options(), "-p", f"no:{PLUGIN}", "--junitxml=before.xml"]
        text = self.run_python(environment(HERE / "harness"), "-m", "pytest", *words)
        passed = {f"of_{page}": Counter(passed=1) for page in IN_TESTS}
        self.assertEqual(self.outcomes("before.xml", text), passed, text)


if __name__ == "__main__":
    run_tests()
