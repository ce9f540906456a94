"""Tests that pytest collects, under run_test.py: one run over a project of them, and a model of every outcome."""

from __future__ import annotations

import json
import textwrap
import unittest
from typing import Any

import pytest
from kit.junit import read_junit
from kit.runs import RunsCase
from kit.with_accelerators import environ_of_accelerators
from pytest_items_project import FILES

from torch_testing_ext.runner.model import ExitCode

pytestmark = pytest.mark.slow

FAILURE, ERROR, PASSED, SKIPPED = "failed", "error", "passed", "skipped"
# pytest has subtests since 9.
SUBTESTS = (FAILURE, "assert 1 != 1") if hasattr(pytest, "Subtests") else (ERROR, "fixture 'subtests' not found")
# By file and test: the outcome, and parts of the message.
MODEL: dict[str, dict[str, tuple[str, ...]]] = {
    "test_plain.py": {
        "test_passes": (PASSED,),
        "test_fails": (
            FAILURE,
            "AssertionError: assert [1, 2] == [1, 3]\n\n    def test_fails",
            "At index 1 diff: 2 != 3",
        ),
        "test_raises": (ERROR, "LookupError: gone\n"),
        "test_sys_exit": (ERROR, "SystemExit: 0\n"),
        "test_exits": ("crashed", "exited with code 0"),
        "test_pytest_exit": (ERROR, "pytest.exit was called: enough"),
        "test_interrupts": (ERROR, "KeyboardInterrupt"),
        "test_pytest_fail": (FAILURE, "by hand"),
        "test_swallowed": (ERROR, "pytest reported no result of its set-up and its call and its tear-down"),
        "test_plugin_crashes": (ERROR, "LookupError: in a hook of the project\n", "conftest.py"),
        "test_stops_the_session": (ERROR, "pytest was asked to stop: it has seen enough"),
        "test_fails_the_session": (ERROR, "pytest was asked to stop: it is bad enough"),
        "test_counts_a_failure": (ERROR, "a pytest plugin counted a failure that it did not report"),
        "test_closes_all": (ERROR, "closed file descriptors"),
        "test_warns": (ERROR, "UserWarning: made an error by pytest.ini"),
        "test_hangs": ("timeout", "test_hangs timed out after", "in test_hangs"),
        "test_param[1]": (PASSED,),
        "test_param[2]": (FAILURE, "AssertionError: assert 2 != 2\n", "'test/test_plain.py::test_param[2]'"),
        "test_param[a b::c/d]": (PASSED,),
        "test_skip": (SKIPPED, "never"),
        "test_skipif": (SKIPPED, "not if"),
        "test_skips_itself": (SKIPPED, "inside"),
        "test_xfail": ("expected failure", "known"),
        "test_xfail_otherwise": (ERROR, "LookupError: not by zero\n"),
        "test_xfail_strict": ("unexpected success", "expected to fail, but passed: known"),
        "test_xpass": (PASSED,),
        "test_xfail_not_run": ("expected failure", "not even run"),
        "TestSlow::test_method": (PASSED,),
        "TestSlow::TestInner::test_inner": (PASSED,),
        "test_fixture_fails_late": (ERROR, "in the tear-down: ValueError: in a tear-down\n"),
        "test_fails_and_its_fixture": (FAILURE, "AssertionError: first", "in the tear-down: ValueError"),
        "test_fixture_exits_late": ("crashed", "exited with code 0"),
        "test_fixture_fails_early": (ERROR, "in the set-up: ValueError: in a set-up\n"),
        "test_no_fixture": (ERROR, "in the set-up: fixture 'nothing_of_this_name' not found\n"),
        "test_fixture_skips": (SKIPPED, "by a fixture"),
        "test_session_fixture_hangs_late": ("timeout", "timed out after", "in wait", "in hangs_late"),
        "test_subtests": SUBTESTS,
    },
    "test_shared.py": {
        **dict.fromkeys(("test_model_1", "test_model_2", "test_server", "test_alone"), (PASSED,)),
        **dict.fromkeys(("test_variant[a]", "test_variant[b]"), (PASSED,)),
        **dict.fromkeys(("TestClass::test_1", "TestClass::test_2", "TestA::test_1", "TestA::test_2"), (PASSED,)),
        **dict.fromkeys(("TestB::test_1", "TestDies::test_1", "TestDies::test_3", "TestEnd::test_1"), (PASSED,)),
        "TestDies::test_2": ("crashed", "exited with code 0"),
        "TestEnd::test_2": (ERROR, "in the tear-down: ValueError: the last one"),
    },
    "test_shared_ranks.py": dict.fromkeys(
        ("test_1", "test_alone", "test_2", "TestClass::test_1", "TestClass::test_2"), (PASSED,)
    ),
    "test_ranks.py": {
        "test_sum": (PASSED,),
        "test_sizes[world_size=1]": (PASSED,),
        "test_sizes[world_size=2]": (FAILURE, "rank 1 of 2 failed", "python run_test.py"),
        "test_hangs": ("timeout", "rank 1: still running", "in test_hangs"),
        "test_wants_more": (SKIPPED, "needs 3 devices"),
        "UnittestTest::test_in_ranks": (PASSED,),
        "UnittestTest::test_skip_of_pytest": (SKIPPED, "by a mark"),
        "UnittestTest::test_xfail_of_pytest": ("expected failure",),
        "UnittestTest::test_expected_to_fail": ("unexpected success", "expected to fail, but passed"),
        "RankedTest::test_of_ranked_case": (FAILURE, "rank 1 of 2 failed"),
        "FixtureTest::test_fixture_of_pytest": (PASSED,),
    },
    "test_bad_mark.py": {
        "test_zero": (ERROR, "the world size is 0", "the world size is 0"),
        "test_beside": (PASSED,),
        "CaseTest::test_of_unittest": (PASSED,),
    },
    "test_late.py": {
        "TestLate::test_inherited": (PASSED,),
        "TestLate::test_late": (FAILURE, "AssertionError: assert 1 == 2\n\nself = <test_late.TestLate"),
    },
    "session/test_session.py": {
        "test_1": (PASSED,),
        "test_2": (PASSED,),
        "test_param[a b::c/d[1]]": (PASSED,),
        "test_param[\\xe9]": (PASSED,),
        "test_raises_at_the_end": (ERROR, "after the test: the end of pytest's session: ValueError: at the end"),
        "test_exits_at_the_end": ("crashed", "exited with code 0", "the end of pytest's session"),
        "test_fails_at_the_end": (ERROR, "a hook has changed the exit status to 1"),
        "test_hangs_at_the_end": ("timeout", "the end of pytest's session timed out", "in pytest_sessionfinish"),
    },
    "test_with_a_thread.py": {"test_in_an_interpreter": (PASSED,)},
    "test_skips_itself.py": {"": (SKIPPED, "there_is_no_such_module")},
    "test_skips_wrongly.py": {"": (ERROR, "Using pytest.skip outside of a test")},
    "test_broken.py": {"": (ERROR, "ModuleNotFoundError: No module named 'there_is_no_such_module'\n")},
    "crash": {"": (ERROR, "conftest.py cannot be imported: ModuleNotFoundError: No module named")},
    "hook/test_hook.py": {"": (ERROR, "not run: pytest cannot collect it: LookupError: in a hook")},
    "streams/test_streams.py": {
        "test_a": (PASSED,),
        "CaseTest::test_u": (PASSED,),
    },
}
EXPECTED = {
    f"test/{file}" + (f"::{name}" if name else ""): must
    for file, tests in MODEL.items()
    for name, must in tests.items()
}
# No message has these.
INTERNAL = ("/_pytest/", "/pluggy/", "torch_testing_ext/runner/", "INTERNALERROR")


class PytestItemsTest(RunsCase):
    maxDiff = None
    found: dict[str, Any]

    def setUp(self) -> None:
        super().setUp()
        for name, text in FILES.items():
            self.write(name, textwrap.dedent(text))

    def test_all(self) -> None:
        words = (
            "-j4",
            "--results=results.json",
            "--junitxml=x.xml",
            # Hooks for sessions count in the conftest files of folders that are named.
            *("test", "test/session"),
            "-m",
            "slow or not slow",
        )
        console = self.finish(self.start(*words, environ=environ_of_accelerators(2)), ExitCode.FAILED)
        results = self.results()
        self.found = {test["id"]: test for test in results["tests"]}
        outcomes = {name: test["outcome"] for name, test in self.found.items()}
        messages = {name: test["attempts"][-1]["message"] for name, test in self.found.items()}
        self.assertEqual(outcomes, {name: must[0] for name, must in EXPECTED.items()}, json.dumps(messages, indent=1))
        for name, (_, *parts) in EXPECTED.items():
            for part in parts:
                self.assertIn(part, messages[name], name)
            self.assertLessEqual(messages[name].count("To run it alone:"), 1, name)
            for part in INTERNAL:
                self.assertNotIn(part, messages[name], name)
        self.check_output()
        self.assertTrue(
            any("pytest leaves out 1 of the tests in test/test_plain.py" in one for one in results["warnings"])
        )
        self.assertIn("test_deselected", console)
        cases = [case.get("name") for case in read_junit((self.root / "x.xml").read_text()).iter("testcase")]
        self.assertEqual(len(cases), len(EXPECTED))
        left = {each.name for each in self.root.iterdir()}
        self.assertEqual(left & {"own.xml", "own_basetemp", ".pytest_cache"}, set())
        self.assertEqual(list(self.temporary.glob("torch_testing_ext_run_*")), [])

    def test_settings_of_a_folder(self) -> None:
        """The settings in a folder count where it is named, as for pytest."""
        self.write("test/usage/pytest.ini", "[pytest]\naddopts = --there-is-no-such-option\n")
        self.write("test/doctest/pytest.ini", "[pytest]\naddopts = --doctest-modules --import-mode=importlib\n")
        self.write("test/doctest/test_doctest.py", 'def test_a():\n    """\n    >>> 1 + 1\n    3\n    """\n')
        self.write("test/usage/test_usage.py", "def test_a(): pass\n")
        usage, doctest = (self.start("--results", f"{name}.json", f"test/{name}") for name in ("usage", "doctest"))
        self.finish(usage, ExitCode.FAILED)
        self.finish(doctest, ExitCode.FAILED)
        (broken,) = self.results("usage.json")["tests"]
        self.assertIn("pytest refuses its options: unrecognized arguments: --there", broken["attempts"][-1]["message"])
        in_doc, function = sorted(self.results("doctest.json")["tests"], key=lambda test: -len(test["id"]))
        self.assertEqual((function["id"], function["outcome"]), ("test/doctest/test_doctest.py::test_a", PASSED))
        self.assertEqual(in_doc["id"], "test/doctest/test_doctest.py::test_doctest.test_a")
        self.assertIn("Expected:\n    3\nGot:\n    2", in_doc["attempts"][-1]["message"])

    def test_marks(self) -> None:
        """Without -m, the marks in pytest's own options count."""
        name = "test/test_plain.py"
        runs = [
            self.start("--list", "-otests=test", *words, name)
            for words in ((), ("-m", "slow"), ("-m", "not (slow or xfail)"))
        ]
        default, slow, others = (self.finish(run, 0).splitlines() for run in runs)
        slow_ones = [f"{name}::TestSlow::test_method", f"{name}::TestSlow::TestInner::test_inner"]
        self.assertEqual(slow, [*slow_ones, "2 tests"])
        self.assertNotIn(slow_ones[0], default)
        self.assertIn(f"{name}::test_xfail", default)
        self.assertIn(f"{name}::test_passes", others)
        self.assertFalse({*slow_ones, f"{name}::test_xfail"}.intersection(others))

    def check_output(self) -> None:
        (failed,) = self.found["test/test_plain.py::test_fails"]["attempts"]
        self.assertIn("printed", failed["output"])
        self.assertIn("logged 3", failed["output"])
        (passed,) = self.found["test/test_ranks.py::test_sum"]["attempts"]
        self.assertEqual([rank["output"].strip()[:10] for rank in passed["ranks"]], ["rank 0 has", "rank 1 has"])
        self.assertEqual(sorted(passed["devices"]), ["0", "1"])


if __name__ == "__main__":
    unittest.main()
