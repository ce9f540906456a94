"""The mark `standalone`: a test in an interpreter of its own, with every outcome that it can have there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, PytestRun, run_pytest

from torch_testing_ext.common_utils import run_tests

HEAD = """
import os, signal, sys, threading, unittest, warnings
import pytest

with open(os.environ["PIDS"], "a") as file:
    file.write(f"{os.getpid()}\\n")

IN_PARENT = os.environ["PIDS"] and len(open(os.environ["PIDS"]).read().split()) == 1
"""
SUBJECT = subject(__file__, "standalone.py")
MODEL = {
    "test_passes[1]": ("passed", ""),
    "TestClass.test_fails": ("failed", "assert 1 == 2"),
    "TestClass.test_skips": ("skipped", "skipped there"),
    "TestClass.test_skipped": ("skipped", "skipped here"),
    "TestClass.test_xfails_otherwise": ("failed", "TypeError"),
    "TestClass.test_xpasses": ("failed", "[XPASS(strict)]"),
    "TestClass.test_xpasses_by_a_mark_of_its_own": ("failed", "[XPASS(strict)]"),
    "TestClass.test_dies": ("failed", "killed by SIGKILL"),
    "TestClass.test_exits": ("failed", "exited with code 0"),
    "TestClass.test_hangs": ("failed", "was terminated after 2.0 s, its time limit"),
    "TestClass.test_set_up_fails": ("failed", "in its set-up: KeyError: 'bad'"),
    "TestClass.test_tear_down_fails": ("failed", "in its tear-down: KeyError: 'worse'"),
    "TestClass.test_ranks_fail": ("failed", "rank 1 of 2 failed"),
    "UnittestTest.test_fails": ("failed", "AssertionError: 1 != 2"),
    "test_plain": ("passed", ""),
}


class StandaloneTest(PytestCase):
    def run_some(self, *names: str) -> tuple[PytestRun, int]:
        """Run these of the tests, and compare their outcomes; and how many processes there were."""
        ids = [f"test_x.py::{name.replace('.', '::')}" for name in names]
        with tempfile.TemporaryDirectory() as folder:
            pids = Path(folder, "pids")
            run = run_pytest({"test_x.py": SUBJECT}, *ids, PIDS=str(pids))
            processes = len(set(pids.read_text().split()))
        chosen = {name: MODEL[name] for name in names}
        self.assertOutcomes(run, {name: outcome for name, (outcome, _) in chosen.items()})
        for name, (_, text) in chosen.items():
            with self.subTest(test=name):
                self.assertIn(text, run.messages[name].partition("\n")[0])
        return run, processes

    @pytest.mark.slow
    def test_one_ends_and_one_dies(self) -> None:
        _, processes = self.run_some("test_passes[1]", "TestClass.test_dies", "test_plain")
        self.assertEqual(processes, 3)

    @pytest.mark.slow
    def test_every_outcome(self) -> None:
        run, processes = self.run_some(*MODEL)
        # One for pytest, and one for each test that is neither plain nor skipped here; one may end too early.
        self.assertIn(processes, (len(MODEL) - 2, len(MODEL) - 1))
        self.assertEqual(run.outputs["test_passes[1]"].count("printed there"), 1)
        self.assertEqual(run.outputs["test_passes[1]"].count("written there"), 1)
        self.assertEqual(run.messages["TestClass.test_skips"].partition("\n")[0], "skipped there")
        self.assertIn("UserWarning: warned there", run.text)
        self.assertNotIn("argparse", str(run.outputs))
        self.assertIn(">       assert value == 2", run.messages["TestClass.test_fails"])

    @pytest.mark.slow
    def test_isolated_ranks(self) -> None:
        """A mark that asks for it, and an option for all marks: what pytest's process has become is not inherited."""
        source = subject(__file__, "isolated_ranks.py")
        first = ("failed", "rank 1 of 2 failed")
        for options, last in (([], ("failed", "all 2 ranks failed")), (["-odist_isolated=true"], ("passed", ""))):
            with tempfile.TemporaryDirectory() as folder:
                run = run_pytest({"test_x.py": source}, *options, PIDS=f"{folder}/pids")
            expected = {"test_changes_the_process": ("passed", ""), "test_isolated": first, "test_forked": last}
            self.assertOutcomes(run, {name: outcome for name, (outcome, _) in expected.items()})
            for name, (_, text) in expected.items():
                self.assertIn(text, run.messages[name].partition("\n")[0])

    def test_refused(self) -> None:
        run = run_pytest({"test_x.py": "import pytest\n@pytest.mark.standalone(2)\ndef test_x(): ..."})
        self.assertOutcomes(run, {"test_x": "error"})
        told = "the only argument of @pytest.mark.standalone is timeout=SECONDS.\n\ntest_x.py:2: test_x\n"
        self.assertIn(told, run.text)


if __name__ == "__main__":
    run_tests()
