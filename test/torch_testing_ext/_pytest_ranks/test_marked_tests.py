"""Tests with the mark `world_size`: each outcome that ranks can have together, and what the report shows."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, PytestRun, run_pytest

from torch_testing_ext.common_utils import run_tests

SUBJECT = subject(__file__, "outcomes_of_marks.py")

# The reason or the first line of the message must contain the second text. A rank that is killed, exits or hangs, and
# ranks that all skip, are in the corpus of launch/test_every_host.py.
# Without subtests of pytest's own, a failed one fails the test as in a unittest.TestResult.
IN_SUBTEST = "in subtest (number=1): AssertionError" if hasattr(pytest, "Subtests") else "AssertionError: 1 != 0"
MODEL = {
    "TestPasses.test_group": ("passed", ""),
    "TestPasses.test_env_rendezvous": ("passed", ""),
    "TestPasses.test_raises": ("passed", ""),
    "TestPasses.test_tells": ("passed", ""),
    "TestPasses.test_parametrized[1]": ("passed", ""),
    "TestPasses.test_parametrized[2]": ("passed", ""),
    "TestPasses.test_capfd": ("passed", ""),
    "TestAsync.test_coroutine": ("failed", "AssertionError: in a coroutine"),
    "TestAsync.test_coroutine_for_a_plugin": ("passed", ""),
    "TestAsync.test_generator_that_is_driven": ("failed", "AssertionError: in a generator"),
    "TestAsync.test_generator_that_is_returned": ("failed", "returned a generator, and nothing of it has run"),
    "CoroutineTest.test_coroutine": ("failed", "rank 1 of 2 failed"),
    "test_sizes[world_size=1]": ("passed", ""),
    "test_sizes[world_size=2]": ("passed", ""),
    "UnittestTest.test_passes": ("passed", ""),
    "UnittestTest.test_fails": ("failed", "rank 1 of 2 failed"),
    "UnittestTest.test_subtest_fails": ("failed", IN_SUBTEST),
    "UnittestTest.test_skips": ("skipped", "unittest's skip"),
    "UnittestTest.test_expected": ("xfail", ""),
    "UnittestTest.test_unexpected": ("failed", "Unexpected success"),
    "UnittestTest.test_tear_down_fails": ("failed", "rank 1 of 2 failed"),
    "TestFails.test_assertion": ("failed", "rank 1 of 2 failed"),
    "TestFails.test_pytest_fail": ("failed", "Failed: by pytest.fail"),
    "TestFails.test_sys_exit_with_0": ("failed", "SystemExit: 0"),
    "TestFails.test_pytest_exit": ("failed", "Exit: enough"),
    "TestFails.test_skips_in_one_rank": ("failed", "skipped"),
    "TestFails.test_both_hang_after_the_end": ("failed", "timed out after"),
    "TestFails.test_thread_raises_and_exits": ("failed", "exited with code 0"),
    "TestFails.test_forked_child": ("failed", "rank 1 of 2 failed"),
    "TestFails.test_warning_is_an_error": ("failed", "UserWarning: made an error"),
    "TestFails.test_tear_down": ("failed", "in the tear-down of a fixture: AssertionError: torn down"),
    "TestFails.test_set_up": ("failed", "AssertionError: set up"),
    "TestMarks.test_skips_in_all_ranks": ("skipped", "in all"),
    "TestMarks.test_skip": ("skipped", "before any rank"),
    "TestMarks.test_skipif": ("skipped", "on a condition"),
    "TestMarks.test_needs_devices": ("skipped", "Need at least 99 accelerator devices"),
    "TestMarks.test_needs_a_backend": ("skipped", "Need at least 99 accelerator devices for the backend nccl"),
    "TestMarks.test_xfail": ("xfail", ""),
    "TestMarks.test_xfail_in_one_rank": ("xfail", ""),
    "TestMarks.test_xfail_by_another_error": ("failed", "Error: not expected"),
    "TestMarks.test_xfail_and_a_death": ("failed", "of 2"),
    "TestMarks.test_xfail_passes": ("failed", "XPASS(strict)"),
    "TestMarks.test_xfail_in_the_body": ("xfail", "in the body"),
    "TestMarks.test_xfail_added_in_the_body": ("xfail", "added"),
    "TestMarks.test_strict_xfail_added_in_the_body": ("failed", "[XPASS(strict)]"),
    "TestMarks.test_strict_xfail_added_by_a_fixture": ("failed", "[XPASS(strict)]"),
}


@pytest.mark.slow
class MarkedTestsTest(PytestCase):
    run_of_subject: PytestRun

    @classmethod
    def setUpClass(cls) -> None:
        cls.run_of_subject = run_pytest({"test_subject.py": SUBJECT}, "--rank-timeout=4")

    def test_every_outcome(self) -> None:
        self.assertOutcomes(self.run_of_subject, {name: outcome for name, (outcome, _) in MODEL.items()})
        self.assertEqual(self.run_of_subject.code, 1)
        for name, (_, text) in MODEL.items():
            with self.subTest(test=name):
                self.assertIn(text, self.run_of_subject.messages[name].partition("\n")[0])

    def test_the_verdict_is_shown_once_and_without_our_frames(self) -> None:
        text = self.run_of_subject.text
        _, _, failure = text.partition("_ TestFails.test_assertion _")
        failure = failure[: failure.index("\n____")]
        self.assertEqual(failure.count("rank 1 of 2 failed: "), 1)
        self.assertEqual(len(re.findall(r"  > +\d+ \| +assert value == 0\n", failure)), 1, failure)
        self.assertIn("assert 1 == 0\n", failure)
        self.assertIn("run again:  python -m pytest test_subject.py::TestFails::test_assertion -p ", failure)
        self.assertIn("Captured stdout and stderr of rank 0 call ---", failure)
        self.assertEqual(failure.count("\nbefore the assertion"), 2)
        for frame in ("torch_testing_ext/", "pluggy", "RankFailure"):
            self.assertNotIn(frame, failure)
        self.assertIn("FAILED test_subject.py::TestFails::test_assertion - rank 1 of 2 failed", text)

    def test_output_logs_warnings_and_properties(self) -> None:
        output = self.run_of_subject.outputs["TestPasses.test_tells"]
        for rank in range(2):
            for text in (f"printed {rank}\n", f"complained {rank}\n", f"logged {rank}\n"):
                self.assertEqual(output.count(text), 1, output)
        self.assertEqual(self.run_of_subject.text.count("UserWarning: warned"), 1)
        self.assertEqual(self.run_of_subject.text.count(" OwnWarning: own"), 1)
        self.assertNotIn("UserWarning: observed", self.run_of_subject.text)


@pytest.mark.slow
class WarningsTest(PytestCase):
    def test_exceptions_in_threads_and_finalizers_are_warnings_of_ranks_of_every_kind(self) -> None:
        """With a filter `error`, they fail the test, also where the ranks were forked under other filters."""
        source = subject(__file__, "warnings_of_ranks.py")
        run = run_pytest({"test_x.py": source})
        names = {
            "in_a_thread": "PytestUnhandledThreadExceptionWarning: Exception in thread ",
            "warned": "UserWarning: ",
        }
        names["in_a_finalizer"] = names["in_a_cycle"] = "PytestUnraisableExceptionWarning: Exception ignored in"
        expected = {}
        for cls, kind in (("TestMarked", "marked"), ("TestSpawn", "spawn"), ("OwnTest", "own"), ("KeptTest", "kept")):
            for one in names if kind == "marked" else list(names)[:3]:
                name = f"{cls}.test_{one}"
                expected[name] = "passed"
                self.assertRegex(run.text, rf"{names[one]}.*{kind}_{one}\b", name)
                if kind != "kept":
                    failed = cls.removesuffix("Test") + ("ErrorTest" if cls.endswith("Test") else "Error")
                    expected[f"{failed}.test_{one}"] = "failed"
                    self.assertIn(names[one], run.messages[f"{failed}.test_{one}"])
        self.assertOutcomes(run, expected)


class OptionsTest(PytestCase):
    def test_streams_with_a_prefix_and_stops_at_the_first_failure(self) -> None:
        source = """
import os
import pytest

@pytest.mark.world_size(2)
def test_a():
    print("streamed")
    assert False

def test_b(): ...
"""
        run = run_pytest({"test_x.py": source}, "-s", "-x")
        self.assertOutcomes(run, {"test_a": "failed"})
        self.assertIn("[rank0] streamed\n", run.errors)
        self.assertIn("[rank1] streamed\n", run.errors)

    @pytest.mark.slow
    def test_log_cli_and_setup_show(self) -> None:
        """Records appear while the test runs, each after its rank and below one title; fixtures appear once."""
        source = subject(__file__, "live_log.py")
        passed = dict.fromkeys(("test_a", "test_b", "test_c", "test_d"), "passed")
        run = run_pytest({"test_x.py": source}, "-v", "-o", "log_cli=true", "--log-cli-level=WARNING")
        self.assertOutcomes(run, passed)
        shown = [line for line in run.text.splitlines() if line.startswith("[rank") or "live log" in line]
        alone = [line for line in run.text.splitlines() if "alone:test_x.py" in line]
        self.assertEqual(len(alone), 2 if pytest.version_tuple >= (9, 1) else 0)
        self.assertEqual({line[:6] for line in alone}, {"[rank0", "[rank1"} if alone else set())
        shown = shown[: len(shown) - len(alone) - 1] if alone else shown
        first, *records, call = shown
        self.assertEqual((first.strip(" -"), call.strip(" -")), ("live log of ranks", "live log call"))
        self.assertEqual(len(records), 3)
        for rank, record in enumerate(sorted(records)):
            self.assertRegex(record, rf"\[rank{rank}\] WARNING +root:test_x.py:13 a record of {rank}")
        run = run_pytest({"test_x.py": source}, "--setup-show")
        self.assertOutcomes(run, passed)
        for what in "SETUP", "TEARDOWN":
            self.assertEqual(len(re.findall(rf"{what} +F of_ranks", run.text)), 3)

    def test_what_torch_logs_of_an_error(self) -> None:
        """From 9.1 on, pytest captures torch's own record of each error, with all of gloo's text."""
        source = """
import pytest
import torch
import torch.distributed as dist

@pytest.mark.world_size(2)
def test_a(dist_env):
    with pytest.raises((RuntimeError, ValueError)):
        dist.broadcast(torch.ones(1), src=7)
    assert not dist_env
"""
        run = run_pytest({"test_x.py": source})
        self.assertOutcomes(run, {"test_a": "failed"})
        self.assertNotIn("func_name", run.text)

    @pytest.mark.slow
    def test_without_plugins_of_pytest(self) -> None:
        """Their options are not there, either."""
        source = """
import pytest

@pytest.mark.world_size(2)
def test_a(dist_env): ...

@pytest.mark.standalone
def test_b(): ...
"""
        without = [word for name in ("capture", "debugging", "setuponly", "logging") for word in ("-p", f"no:{name}")]
        run = run_pytest({"test_x.py": source}, *without)
        self.assertOutcomes(run, {"test_a": "passed", "test_b": "passed"})

    def test_ranks_that_cannot_be_forked_are_an_error_that_says_why(self) -> None:
        source = subject(__file__, "unforkable.py")
        run = run_pytest({"test_x.py": source})
        self.assertOutcomes(run, {"test_a": "failed", "test_b": "passed", "test_c": "failed"})
        self.assertIn("it runs other threads (busy)", run.messages["test_a"])
        self.assertIn("ask for dist_env", run.messages["test_a"])
        self.assertIn("TORCH_TESTING_EXT_START=spawn", run.messages["test_c"])

    @pytest.mark.slow
    def test_fixtures_that_start_ranks(self) -> None:
        source = subject(__file__, "fixtures_that_start_ranks.py")
        run = run_pytest({"test_x.py": source})
        self.assertOutcomes(run, {"test_passes": "passed", "test_fails": "failed"})
        self.assertIn("[rank1] in rank 1\n", run.outputs["test_passes"])
        self.assertIn("rank 1 of 2 failed", run.messages["test_fails"])
        self.assertIn("\ntest_x.py:14: in test_fails", run.messages["test_fails"])
        self.assertNotIn("torch_testing_ext/", run.messages["test_fails"])

    @pytest.mark.slow
    def test_under_xdist(self) -> None:
        source = """
import os
import pytest

@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", range(3))
def test_a(number, dist_env):
    assert number < 2 or dist_env.rank == 0
"""
        run = run_pytest({"test_x.py": source}, "-n", "2", "-v")
        self.assertOutcomes(run, {"test_a[0]": "passed", "test_a[1]": "passed", "test_a[2]": "failed"})
        self.assertIn("rank 1 of 2 failed", run.messages["test_a[2]"])
        self.assertIn("ranks ran on: cpu (3 tests)", run.text)


class FixturesTest(PytestCase):
    def test_which_fixtures_run_where(self) -> None:
        """Those that need dist_env run in each rank, the others once, in the parent; ranks inherit what they gave."""
        source = subject(__file__, "where_fixtures_run.py")
        with tempfile.TemporaryDirectory() as folder:
            run = run_pytest({"test_x.py": source}, folder=folder)
            lines = Path(folder, "written").read_text().splitlines()
        self.assertOutcomes(run, {"test_a": "passed", "test_b": "passed"})
        in_parent = [line for line in lines if "in parent" in line]
        self.assertEqual(
            in_parent,
            [
                *("set up of_session in parent", "set up of_module in parent", "set up of_function in parent"),
                *("tear down of_function in parent", "test_b in parent"),
                *("tear down of_module in parent", "tear down of_session in parent"),
            ],
        )
        for rank in range(2):
            self.assertEqual(
                [line.replace(f"in rank {rank}", "") for line in lines if f"in rank {rank}" in line],
                ["set up in_ranks ", "test_a : ['of_session']", "tear down in_ranks "],
            )


if __name__ == "__main__":
    run_tests()
