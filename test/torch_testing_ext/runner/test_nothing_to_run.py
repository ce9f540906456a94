"""Files whose tests are not, or not all, tests of unittest: what run_test.py says and how it exits."""

import json
import os
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kit.junit import read_junit
from kit.runs import ROOT, run_test

from torch_testing_ext.runner.model import ExitCode

pytestmark = pytest.mark.slow

RUN_TEST = """
import sys
from pathlib import Path
from torch_testing_ext.runner.cli import main
sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent))
"""
CASE = "import unittest\nclass CaseTest(unittest.TestCase):\n    def test_good(self): pass\n"
BOTH = CASE + "def test_function(): pass\nclass TestPlain:\n    def test_method(self): pass\n"
SKIPS = "import unittest\nraise unittest.SkipTest('not here')\n"
WHY = "unittest does not run it, and pytest is not installed"


class NothingToRunTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_")
        self.addCleanup(directory.cleanup)
        self.root = Path(directory.name).resolve()
        (self.root / "run_test.py").write_text(RUN_TEST)
        self.how = {}

    def write(self, **sources):
        for name, source in sources.items():
            file = self.root / f"test/distributed/{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)

    def run_test(self, code, last_line, *words, **environ):
        run = run_test(self.root, *words, "--junitxml", "x.xml", "--results", "results.json", **self.how, **environ)
        self.assertEqual(run.code, code, run.console + run.complaints)
        self.assertEqual(run.console.splitlines()[-1], last_line)
        return run

    def without_pytest(self):
        """From here on, no interpreter of a run can import pytest."""
        folder = self.root / "no_pytest"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text("import sys\nsys.modules['pytest'] = None\n")
        # Not by the server of the tests, which has imported what it needs already.
        self.how = {"cold": True, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}

    def test_a_shard_without_tests(self):
        """There are fewer tests than shards: that is no fault of this one, unless no test is selected at all."""
        self.write(test_good=CASE)
        self.run_test(ExitCode.PASSED, "1 passed, 0 failed, 0 skipped", "--shard=2/2")
        run = self.run_test(ExitCode.PASSED, "0 passed, 0 failed, 0 skipped", "--shard=1/2")
        self.assertIn("this shard is empty: the others have all tests", run.console)
        self.run_test(ExitCode.NOTHING_SELECTED, "0 passed, 0 failed, 0 skipped", "--shard=1/2", "-k", "nothing")

    def test_tests_for_pytest_without_pytest(self):
        self.write(test_both=BOTH, test_good=CASE)
        self.without_pytest()
        run = self.run_test(ExitCode.FAILED, "2 passed, 2 failed, 0 skipped")
        names = (
            "test/distributed/test_both.py::test_function",
            "test/distributed/test_both.py::TestPlain::test_method",
        )
        for name in names:
            self.assertIn(name, run.console)
        self.assertIn(WHY, run.console)
        self.assertIn("pip install pytest", run.console)
        suites = read_junit(run.report("x.xml"))
        self.assertEqual(
            sorted(case.get("name") for case in suites.iter("testcase") if len(case)), ["test_function", "test_method"]
        )

        # A test of unittest beside them can be green by itself.
        with ThreadPoolExecutor(2) as two_at_once:
            alone = two_at_once.submit(run_test, self.root, "test_both::CaseTest", **self.how)
            function = two_at_once.submit(run_test, self.root, "test_both::test_function", **self.how)
            listing = two_at_once.submit(run_test, self.root, "--list=json", **self.how)
        for run, code, last_line in (
            (alone.result(), ExitCode.PASSED, "1 passed, 0 failed, 0 skipped"),
            (function.result(), ExitCode.FAILED, "0 passed, 1 failed, 0 skipped"),
        ):
            self.assertEqual((run.code, run.console.splitlines()[-1]), (code, last_line), run.console + run.complaints)
        listed = json.loads(listing.result().console)
        self.assertEqual([broken["id"] for broken in listed["broken"]], list(names))

    def test_shards_share_what_cannot_be_run(self):
        self.write(test_both=BOTH)
        self.without_pytest()
        seen = []
        for part in ("1/2", "2/2"):
            run_test(self.root, "--shard", part, "--results", "results.json", **self.how)
            seen += [test["id"] for test in json.loads((self.root / "results.json").read_text())["tests"]]
        self.assertEqual(len(seen), 3)
        self.assertEqual(len(set(seen)), 3)

    def test_a_file_without_tests(self):
        self.write(test_empty="VALUE = 3\n")
        mention = "warning: test/distributed/test_empty.py has no tests: pytest finds none in it"
        run = self.run_test(ExitCode.NOTHING_SELECTED, "0 passed, 0 failed, 0 skipped")
        self.assertIn(mention, run.console)
        self.write(test_good=CASE)
        run = self.run_test(ExitCode.PASSED, "1 passed, 0 failed, 0 skipped")
        self.assertIn(mention, run.console)
        self.assertIn(mention.partition(": ")[2], json.loads(run.report("results.json"))["warnings"])

    def test_a_module_in_which_pytest_looks_for_doctests_alone(self):
        """It needs none, unless you name it."""
        self.write(test_good=CASE, helper="VALUE = 3\n")
        (self.root / "pytest.ini").write_text("[pytest]\naddopts = --doctest-modules\n")
        run = self.run_test(ExitCode.PASSED, "1 passed, 0 failed, 0 skipped")
        self.assertNotIn("has no tests", run.console)
        run = run_test(self.root, "test/distributed/helper.py", **self.how)
        self.assertIn("test/distributed/helper.py has no tests", run.console)

    def test_a_file_that_skips_itself(self):
        self.write(test_skips=SKIPS, test_good=CASE)
        run = self.run_test(ExitCode.PASSED, "1 passed, 0 failed, 1 skipped")
        self.assertIn("1  not here", run.console)
        (skipped,) = read_junit(run.report("x.xml")).iter("skipped")
        self.assertEqual(skipped.get("message"), "not here")
        self.run_test(ExitCode.PASSED, "0 passed, 0 failed, 1 skipped", "test_skips::AnyTest::test_any")


if __name__ == "__main__":
    unittest.main()
