"""How reports of pytest are judged: a table of tests, each judged by the reports that pytest makes of it."""

from __future__ import annotations

import json
import tempfile
import types
import unittest
from pathlib import Path

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext._pytest_ranks.reports import TestReports
from torch_testing_ext.common_utils import run_tests

# A plugin that judges each test twice: with the exceptions, as a worker does, and by serialised reports, as a parent.
PLUGIN = subject(__file__, "report_keeping_plugin.py")
SUBJECT = subject(__file__, "judged_reports.py")
WORSE = ("error", "KeyError: 'worse'", "tear-down")
# By test: its outcome, its reason or else the title of its failure; then the phase, the need, and if ranks decided.
MODEL = {
    "test_passes": [("passed", "")],
    "test_assertion": [("failed", "AssertionError: assert 1 == 2")],
    "test_exception": [("error", "KeyError: 'key'")],
    "test_fail": [("failed", "Failed: by pytest.fail")],
    "test_exits": [("error", "SystemExit: 0")],
    "test_skips": [("skipped", "in the call")],
    "test_skipped": [("skipped", "by a mark")],
    "test_unittest_skips": [("skipped", "of unittest")],
    "test_needs": [("skipped", "too few devices", "", "2 devices")],
    "test_xfails": [("expected failure", "it is known")],
    "test_xfails_without_reason": [("expected failure", "")],
    "test_xfails_otherwise": [("error", "ValueError: other")],
    "test_calls_xfail": [("expected failure", "it gives up")],
    "test_xpasses": [("passed against xfail", "it is thought")],
    "test_strict_xpass": [("unexpected success against xfail", "it is sure")],
    "test_strict_xpass_without_reason": [("unexpected success against xfail", "[XPASS(strict)]")],
    "test_set_up": [("error", "AssertionError: bad", "set-up")],
    "test_tear_down": [WORSE],
    "test_both": [("failed", "AssertionError: assert False"), WORSE],
    "test_strict_xpass_and_tear_down": [("unexpected success against xfail", "it is sure")],
    "test_tear_down_skips": [("passed", "")],
    "test_unknown_fixture": [("error", "fixture 'nowhere' not found", "set-up")],
    "test_ranks": [("timeout", "RuntimeError: rank 1 of 2 hangs", "", None, True)],
    "UnittestTest::test_fails": [("failed", "AssertionError: of unittest")],
    "UnittestTest::test_skips": [("skipped", "of unittest")],
    "UnittestTest::test_expected": [("expected failure", "")],
    "UnittestTest::test_unexpected": [("unexpected success", "Failed: Unexpected success")],
}
UNEXPECTED = "Unexpected success" if pytest.version_tuple < (7, 4) else "Failed: Unexpected success"
# The same in another process, where there are no exceptions: a failure of a call is one of an assertion.
SENT = MODEL | {
    # Before pytest 7.4, the report has no exception for it.
    "UnittestTest::test_unexpected": [("unexpected success", UNEXPECTED)],
    "test_assertion": [("failed", "assert 1 == 2")],
    "test_exception": [("failed", "KeyError: 'key'")],
    "test_exits": [("failed", "SystemExit: 0")],
    "test_needs": [("skipped", "too few devices")],
    "test_xfails_otherwise": [("failed", "ValueError: other")],
    "test_both": [("failed", "assert False"), WORSE],
    "test_ranks": [("failed", "rank 1 of 2 hangs")],
}


def filled(
    outcome: str, text: str, phase: str = "", need: str | None = None, is_of_ranks: bool = False
) -> tuple[str | bool | None, ...]:
    return outcome, text, phase, need, is_of_ranks


class JudgedReportsTest(PytestCase):
    def test_a_table(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "found")
            run = run_pytest({"conftest.py": PLUGIN, "test_x.py": SUBJECT}, FOUND=str(path))
            found = json.loads(path.read_text())
        self.assertEqual(set(found), set(MODEL), run.text)
        for name in MODEL:
            for model, judged in zip((MODEL, SENT), found[name], strict=True):
                with self.subTest(test=name, model="SENT" if model is SENT else "MODEL"):
                    self.assertEqual([tuple(each) for each in judged], [filled(*each) for each in model[name]])


def report(when: str, outcome: str) -> types.SimpleNamespace:
    kinds = {kind: kind == outcome for kind in ("passed", "failed", "skipped")}
    return types.SimpleNamespace(when=when, outcome=outcome, longrepr=("", 0, "Skipped: why"), sections=[], **kinds)


class UnfinishedTest(unittest.TestCase):
    def test_phases_without_an_end(self) -> None:
        """Reports that pytest itself never leaves out: a process that dies or a plugin does."""
        for phases, expected in (
            ([], "pytest reported no result of its set-up and its call and its tear-down"),
            ([("setup", "passed"), ("call", "passed")], "pytest reported no result of its tear-down"),
            ([("setup", "passed"), ("teardown", "passed")], "pytest reported no result of its call"),
            ([("setup", "skipped")], "pytest reported no result of its call and its tear-down"),
            ([("setup", "skipped"), ("teardown", "passed")], ""),
            (
                [("setup", "passed"), ("call", "rerun"), ("teardown", "passed")],
                "pytest reported no end of it, only: rerun",
            ),
            ([("setup", "passed"), ("call", "rerun"), ("call", "passed"), ("teardown", "passed")], ""),
        ):
            with self.subTest(phases=phases):
                reports = TestReports()
                for when, outcome in phases:
                    reports.add(report(when, outcome))
                (judged,) = reports.judge()
                self.assertEqual(judged.title, expected)
                self.assertEqual(judged.is_unfinished, bool(expected))


if __name__ == "__main__":
    run_tests()
