"""The plugin together with pytest-xdist, -rerunfailures, -timeout, -cov and -asyncio, in one run and each by itself."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import unittest
from pathlib import Path

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext import pytest_plugin
from torch_testing_ext.common_utils import run_tests

OTHERS = ("xdist", "pytest_rerunfailures", "pytest_timeout", "pytest_cov", "pytest_asyncio")
MISSING = [name for name in OTHERS if importlib.util.find_spec(name) is None]
# Each function is called in one kind of rank; the numbers of the lines that run there follow from the source.
MEASURED = subject(__file__, "measured_by_coverage.py")
SUBJECT = subject(__file__, "with_plugins.py")
MODEL = {
    "test_ranks": "passed",
    "test_flaky": "passed",
    "test_fails": "failed",
    "test_hangs": "failed",
    "test_timeout_by_a_thread": "passed",
    "test_async": "passed",
    "test_async_fixture": "passed",
    "UnittestTest.test_ranks": "passed",
    "test_spawn": "passed",
    "test_fixture": "passed",
    "test_standalone": "passed",
}


@unittest.skipIf("xdist" in MISSING, "needs pytest-xdist")
class WorkersOfXdistTest(unittest.TestCase):
    def test_they_run_tests_in_the_main_thread(self) -> None:
        """Also before pytest-xdist 3.6. Whoever names another kind of worker gets that."""
        import execnet

        given = [execnet.XSpec(text) for text in ("popen", "popen//execmodel=thread")]
        pytest_plugin.pytest_xdist_setupnodes(given)
        self.assertEqual([spec.execmodel for spec in given], ["main_thread_only", "thread"])


@unittest.skipIf(MISSING, f"not installed: {', '.join(MISSING)}; pip install -e '.[test]' installs them")
class WithPluginsTest(PytestCase):
    def run_all(self, *options: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            measures = ("--cov=measured", "--cov-report=json", "--cov-report=")
            files = {"test_x.py": SUBJECT, "measured.py": MEASURED}
            run = run_pytest(files, *measures, "--reruns=1", "--timeout=120", *options, folder=folder)
            self.assertOutcomes(run, MODEL)
            # A rerun has fresh ranks: each of the two runs of the test ran in both ranks.
            self.assertEqual(sorted(Path(folder, "runs").read_text().split()), ["0", "0", "1", "1"])
            (measured,) = json.loads(Path(folder, "coverage.json").read_text())["files"].values()
        lines = MEASURED.splitlines()
        missed = [lines[number - 1].strip() for number in measured["missing_lines"]]
        self.assertEqual(missed, ['return "never"', "return 7"])
        self.assertIn("rank 1 of 2 failed: AssertionError: assert 1 == 0", run.messages["test_fails"])
        self.assertIn("Timeout", run.messages["test_hangs"])
        self.assertIn("timeout=60", run.messages["test_hangs"])  # the remedy

    @pytest.mark.slow
    def test_all_in_one_process(self) -> None:
        self.run_all("-p", "no:xdist")

    @pytest.mark.slow
    def test_all_under_xdist(self) -> None:
        self.run_all("-n", "2")

    def test_async_fixtures_of_ranks_are_refused(self) -> None:
        source = subject(__file__, "async_fixtures.py")
        run = run_pytest({"test_x.py": source})
        self.assertOutcomes(run, {"test_async": "failed", "test_fixture": "error", "test_generator": "error"})
        self.assertIn("rank 1 of 2 failed: AssertionError: assert (1 + 1) == 1", run.messages["test_async"])
        for name, fixture in (("test_fixture", "group"), ("test_generator", "values")):
            self.assertRegex(run.text, rf"(?m)^fixture {fixture!r} is `async`.*\n\ntest_x\.py:\d+: {name}$")


if __name__ == "__main__":
    run_tests()
