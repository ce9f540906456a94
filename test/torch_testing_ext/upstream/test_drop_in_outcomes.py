"""Runs one test file on PyTorch's classes and on ours: all outcomes are the same, except where we are stricter."""

from __future__ import annotations

import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kit.processes import run_python

from torch_testing_ext.common_utils import TestCase, run_tests

pytestmark = pytest.mark.slow

SUBJECT = Path(__file__).with_name("drop_in_subject.py")
STRICTER = "ProcessesTest.test_one_rank_exits"


def outcomes(*options: str) -> dict[str, tuple[str, str]]:
    """Run the subject with pytest, and return each test's outcome and message."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        words = ["-p", "no:cacheprovider", "-q", f"--junitxml={report}", f"--rootdir={directory}", "--noconftest"]
        # PyTorch's test classes leave files there.
        done = run_python("-m", "pytest", *words, *options, SUBJECT, TMPDIR=directory)
        if not report.exists():
            raise AssertionError(f"pytest ran no tests:\n{done.stdout}{done.stderr}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            kind = found.get("type", kind).rpartition(".")[2] if kind == "skipped" else "failed"
            return kind, f"{found.get('message')}\n{found.text}"
    return "passed", ""


class DropInOutcomesTest(TestCase):
    def test_outcomes_are_the_same(self) -> None:
        with ThreadPoolExecutor() as both:
            running = both.submit(outcomes)
            ours = outcomes("-p", "torch_testing_ext.pytest_plugin", "--drop-in")
            theirs = running.result()
        expected = {name: outcome for name, (outcome, _) in theirs.items()}
        found = {name: outcome for name, (outcome, _) in ours.items()}
        self.assertEqual({"passed", "failed", "skip", "xfail"} - {*expected.values()}, set())
        self.assertEqual(expected.pop(STRICTER), "passed")
        self.assertEqual(found.pop(STRICTER), "failed")
        self.assertEqual(found, expected)
        message = ours[STRICTER][1]
        self.assertIn("stricter than PyTorch, where the test would have passed", message)
        self.assertRegex(message, r"\nrun again:  .* -m pytest .* -p torch_testing_ext.pytest_plugin --drop-in\n")
        self.assertNotIn("stricter", ours["OneProcessTest.test_fails"][1])


if __name__ == "__main__":
    run_tests()
