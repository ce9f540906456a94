"""The mark `layouts`: a test for each layout, one reference for all, other runners, and what it refuses."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from kit.files import subject
from kit.processes import clean_environ, start_python
from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

# Each is the body of a file, with the text that must be in its error.
REFUSED = {
    "nothing": ("@mark()\ndef test_x(layout): ...", "no layout is given: write at least one, such as 'tp=2'"),
    "bare": ("@pytest.mark.layouts\ndef test_x(layout): ...", "no layout is given"),
    "number": ("@mark(2)\ndef test_x(layout): ...", "2 is no layout: write 'single', or axes such as 'dp=2 tp=2'"),
    "list": ("@mark(['tp=2'])\ndef test_x(layout): ...", "['tp=2'] is no layout"),
    "text": ("@mark('tp2')\ndef test_x(layout): ...", "'tp2' is no layout"),
    "twice": ("@mark('tp=2', 'tp=2')\ndef test_x(layout): ...", "'tp=2' is given twice"),
    "two_marks": ("@mark('tp=2')\n@mark('dp=2')\ndef test_x(layout): ...", "the test has this mark twice"),
    "many": ("@mark('dp=2048')\ndef test_x(layout): ...", "the layout is 'dp=2048'; at most 1024 are possible"),
    "arrows": ("@mark('tp=2 -> tp=2 -> tp=2')\ndef test_x(layout): ...", "has 2 arrows"),
    "unknown": ("@mark('tp=2', sed=1)\ndef test_x(layout): ...", "layouts have no argument sed"),
    "reference": ("@mark('tp=2', reference='tp=1')\ndef test_x(layout): ...", "it must be one rank: 'single'"),
    "dtypes": ("@mark('tp=2', dtypes=('float64',))\ndef test_x(layout): ...", "dtypes is ('float64',)"),
    "no_dtype": ("@mark('tp=2', dtypes=())\ndef test_x(layout): ...", "dtypes is ()"),
    "integers": ("import torch\n@mark('tp=2', dtypes=torch.int64)\ndef test_x(layout): ...", "dtypes is torch.int64"),
    "data": ("@mark('tp=2', data='dp cp')\ndef test_x(layout): ...", "data is 'dp cp'; it must have names of axes"),
    "save_after": ("@mark('tp=2', save_after=0)\ndef test_x(layout): ...", "save_after is 0; it must be a number, 1"),
    "seed": ("@mark('tp=2', seed='x')\ndef test_x(layout): ...", "seed is 'x'"),
    "timeout": ("@mark('tp=2', timeout=0)\ndef test_x(layout): ...", "timeout is 0; it must be a positive number"),
    "devices": ("@mark('tp=2', devices='all')\ndef test_x(layout): ...", "devices is 'all'"),
    "strict": ("@mark('tp=2', strict=1)\ndef test_x(layout): ...", "strict is 1; it must be True or False"),
    "world_size": ("@mark('tp=2')\n@pytest.mark.world_size(2)\ndef test_x(layout): ...",
                   "the test has the mark world_size"),
    "single": ("@mark('single')\ndef test_x(layout): ...", "'single' is one rank, as the reference is, so that"),
    "size_1": ("@mark('tp=1 dp=1')\ndef test_x(layout): ...", "'tp=1 dp=1' is one rank, as the reference is"),
    "no_fixture": ("@mark('tp=2')\ndef test_x(): ...", "the test has no argument layout"),
    "of_fixture": ("@pytest.fixture\ndef own(layout): ...\n@mark('tp=2')\ndef test_x(own): ...",
                   "the test has no argument layout, which only a test can have, and no fixture"),
    "no_mark": ("def test_x(layout): ...", "layout exists only in tests with the mark layouts"),
    "unittest": ("import unittest\nclass T(unittest.TestCase):\n    @mark('tp=2')\n    def test_x(self): ...",
                 "a test of unittest has the decorator instead: torch_testing_ext.layouts.layouts"),
    "coroutine": ("@mark('tp=2')\nasync def test_x(layout): ...", "async"),
}  # fmt: skip
HEAD = "import pytest\nmark = pytest.mark.layouts\n"
TRAINING = subject(__file__, "trained_under_layouts.py")
OUTCOMES = {"test_it[dp=2]": "passed", "test_it[ep=2]": "failed", "test_it[dp=4]": "passed"}


@pytest.mark.slow
class RefusedLayoutsTest(PytestCase):
    def test_each_is_refused(self) -> None:
        files = {f"test_{name}.py": f"{HEAD}{body}\n" for name, (body, _) in REFUSED.items()}
        run = run_pytest(files)
        self.assertEqual(run.code, 1, run.text)
        for name, (_, text) in REFUSED.items():
            with self.subTest(name):
                self.assertIn(text, run.text)
                self.assertRegex(run.text, rf"(ERROR|FAILED) test_{name}\.py::")


@pytest.mark.slow
class LayoutsInRunnersTest(PytestCase):
    def outcomes(self, *options: str) -> tuple[dict[str, str], str, str]:
        """The outcomes of pytest, its text, and a mark for each training of the reference."""
        with tempfile.TemporaryDirectory() as folder:
            count = Path(folder, "count")
            run = run_pytest({"test_it.py": TRAINING}, *options, COUNT=str(count))
            return {re.sub(r".*::", "", test): each for test, each in run.outcomes.items()}, run.text, count.read_text()

    def test_pytest(self) -> None:
        outcomes, text, trained = self.outcomes()
        self.assertEqual(outcomes, OUTCOMES, text)
        self.assertIn("ep=2 does not train as single: the gradient of bias, step 0", text)
        # The reference and its control, once for all layouts, and the samples alone for the diagnosis.
        self.assertLessEqual(len(trained), 8, trained)

    def test_fake_accelerators(self) -> None:
        outcomes, text, _ = self.outcomes("--fake-accelerators=4")
        self.assertEqual(outcomes, OUTCOMES, text)

    def test_too_few_accelerators(self) -> None:
        """A layout of more ranks than there are devices is skipped, as with the mark world_size."""
        training = TRAINING.replace('"dp=2", "ep=2", "dp=4"', '"dp=4", devices=1')
        with tempfile.TemporaryDirectory() as folder:
            run = run_pytest({"test_x.py": training}, "--fake-accelerators=2", "-rs", COUNT=f"{folder}/count")
        self.assertEqual(run.code, 0, run.text)
        self.assertIn("Need at least 4 accelerator devices", run.text)
        self.assertEqual(set(run.outcomes.values()), {"skipped"}, run.text)

    @pytest.mark.nightly
    def test_xdist(self) -> None:
        pytest.importorskip("xdist", reason="pytest-xdist is not installed")
        outcomes, text, _ = self.outcomes("-n", "2", "-p", "xdist")
        self.assertEqual(outcomes, OUTCOMES, text)

    def test_torchtest(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_it.py").write_text(TRAINING)
            words = ("-m", "torch_testing_ext", "--results", "results.json", "test_it.py")
            run = start_python(*words, cwd=Path(folder), **clean_environ(COUNT=f"{folder}/count"))
            text, _ = run.communicate()
            self.assertEqual(run.returncode, 1, text)
            results = json.loads(Path(folder, "results.json").read_text())
            # The command has an interpreter of its own.
            words = ("-m", "torch_testing_ext", "show", "--json")
            show = start_python(*words, cwd=Path(folder), **clean_environ())
            shown, _ = show.communicate()
        self.assertIn("ep=2 does not train as single: the gradient of bias, step 0", text)
        tests = {re.sub(r".*::", "", test["id"]): test for test in results["tests"]}
        self.assertEqual({name: test["outcome"] for name, test in tests.items()}, OUTCOMES)
        failure = tests["test_it[ep=2]"]["attempts"][0]["failure"]
        self.assertEqual(failure["title"], "ep=2 does not train as single: the gradient of bias, step 0")
        self.assertEqual(failure["values"], ["the sum over ep is the reference: a reduction over ep is missing"])
        self.assertEqual([row["ranks"] for row in failure["rows"]], [[0], [1]])
        told = json.loads(shown)
        self.assertEqual((told["test"], told["kind"]), ("test_it.py::test_it[ep=2]", "failed"), shown)
        self.assertEqual(
            {name: told[name] for name in ("title", "rows", "values")},
            {name: failure[name] for name in ("title", "rows", "values")},
        )


if __name__ == "__main__":
    run_tests()
