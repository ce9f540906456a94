"""`torchtest report --about`: what a report of a bug needs."""

import contextlib
import io
import os
import unittest
from unittest import mock

import pytest
from kit.files import FolderCase
from kit.invented_runs import attempt, run_events, send

from torch_testing_ext import __version__
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.cli import main
from torch_testing_ext.runner.model import FinishedTest, Test, TestId
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.report import about, journal, journal_writer

FIRST, SECOND = TestId("test_sum.py", "", "test_sum"), TestId("test_sum.py", "", "test_max")


class AboutTest(FolderCase):
    def keep_run(self, *failed):
        """A run in which these tests fail, and one passes."""
        path = self.root / ".torch_testing_ext" / "runs" / "1" / journal.NAME
        path.parent.mkdir(parents=True)
        failures = [attempt("", TestOutcome.FAILED, message=f"{test} is wrong", test=Test(test)) for test in failed]
        passed = attempt("", TestOutcome.PASSED, test=Test(TestId("test_sum.py", "", "test_min")))
        finished = [FinishedTest((each,)) for each in (*failures, passed)]
        send(journal_writer.Journal(path, journal.header_of(Options()), self.fail), run_events(finished))
        return path

    def lines(self, environ=None, place=None):
        with mock.patch.object(about, "_lines_of_torch", lambda: ["notes groups: torch: f"]):
            return [*about.lines_about(environ or {}, place or self.root / ".torch_testing_ext")]

    def test_without_a_run(self):
        versions, system, variables, *rest = self.lines({"HOME": "/root", "NCCL_DEBUG": "INFO", "TORCH_X": "1"})
        self.assertIn(f"torch-testing-ext {__version__}, torch ", versions)
        self.assertRegex(system, r"^system: .+, \d+ cores$")
        self.assertEqual(variables, "variables: NCCL_DEBUG=INFO TORCH_X=1")
        self.assertEqual(rest, ["replaced in torch while ranks need it:", "  notes groups: torch: f"])

    def test_no_variable(self):
        self.assertIn("variables: none", self.lines({"AWS_SECRET_ACCESS_KEY": "x"}))

    def test_with_a_run(self):
        """All failures are counted, and the first one is told."""
        path = self.keep_run(FIRST, SECOND)
        for place in (None, path, path.parent):
            with self.subTest(place):
                text = "\n".join(self.lines(place=place))
                self.assertIn("\nfailures in the latest run: 2\n", text)
                self.assertIn(f"{FIRST} is wrong", text)
                self.assertNotIn(f"{SECOND} is wrong", text)

    def test_a_run_without_failures(self):
        self.keep_run()
        self.assertEqual(self.lines()[-1], "failures in the latest run: 0")

    @pytest.mark.slow  # an interpreter asks torch
    def test_the_command(self):
        self.keep_run(FIRST)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.root)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(main(["report", "--about"], self.root), 0)
        text = said.getvalue()
        self.assertIn("\n  notes the groups of a process", text)
        self.assertIn("torch.distributed.distributed_c10d: _new_process_group_helper\n", text)
        self.assertIn(f"{FIRST} is wrong", text)
        self.assertFalse((self.root / "results.json").exists())


if __name__ == "__main__":
    unittest.main()
