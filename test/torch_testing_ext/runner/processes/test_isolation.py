"""Whatever a test does to its process, other tests are unaffected and its outcome is right."""

import os
import re

import pytest
from kit.files import subject
from kit.processes import descendants, is_alive, open_descriptors
from kit.project import Project

from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner import events
from torch_testing_ext.runner.options import Repeat


def setUpModule():
    global PROJECT
    PROJECT = Project()


def tearDownModule():
    PROJECT.close()


class TestOutcomes(TestCase):
    """In the process of the test, without ranks."""

    def run_source(self, source, **options):
        return PROJECT.run(PROJECT.write("import unittest\n" + _dedent(source)), **options)

    def test_every_outcome_of_unittest(self):
        ran = self.run_source(subject(__file__, "outcomes_of_unittest.py"))
        self.assertEqual(
            ran.outcomes,
            {
                "test_passes": "passed",
                "test_fails": "failed",
                "test_raises": "error",
                "test_skips": "skipped",
                "test_is_skipped": "skipped",
                "test_fails_as_expected": "expected failure",
                "test_passes_against_expectation": "unexpected success",
                "test_exits": "error",
                "test_interrupts": "error",
                "test_subtests": "failed",
            },
        )
        self.assertIn("AssertionError: 1 != 2", ran["test_fails"].said)
        self.assertIn("ValueError: no such thing", ran["test_raises"].said)
        self.assertIn("::T::test_raises", ran["test_raises"].end.failure.rerun_command)
        self.assertEqual(ran["test_skips"].said, "not today")
        self.assertEqual(ran["test_is_skipped"].said, "never")
        # Before, pytest does not say which subtest it was.
        if pytest.version_tuple >= (9,):
            self.assertIn("(i=1)", ran["test_subtests"].said)
        self.assertIn("KeyboardInterrupt", ran["test_interrupts"].said)

    def test_a_process_that_dies(self):
        ran = self.run_source(
            """
            import os, signal, sys
            class T(unittest.TestCase):
                def test_killed(self): os.kill(os.getpid(), signal.SIGKILL)
                def test_crashes(self):
                    print("about to crash")
                    os.kill(os.getpid(), signal.SIGSEGV)
                def test_exits(self): os._exit(0)
                def test_is_not_touched(self): pass
            """
        )
        self.assertEqual(ran.outcomes.pop("test_is_not_touched"), "passed")
        self.assertEqual(set(ran.outcomes.values()), {"crashed"})
        self.assertIn("killed by SIGKILL", ran["test_killed"].said)
        self.assertIn("killed by SIGSEGV", ran["test_crashes"].said)
        self.assertIn("in test_crashes", ran["test_crashes"].said)  # the stack
        self.assertIn("about to crash", ran["test_crashes"].output)
        self.assertIn("exited with code 0", ran["test_exits"].said)

    def test_changes_by_a_test_are_invisible_to_others(self):
        ran = self.run_source(subject(__file__, "changes_of_the_process.py"))
        self.assertEqual(set(ran.outcomes.values()), {"passed"}, [a[0].said for a in ran.attempts.values()])

    def test_a_timeout_shows_stacks(self):
        ran = self.run_source(
            subject(__file__, "hanging_tests.py"),
            timeout=0.4,
        )
        self.assertEqual(set(ran.outcomes.values()), {"timeout"})
        for name, limit in (("test_hangs_for_the_default", 0.4), ("test_hangs", 0.2)):
            seconds = re.findall(r"timed out after (\d+\.\d) s", ran[name].said)[0]
            self.assertGreaterEqual(float(seconds), limit)
        _, _, stacks = ran["test_hangs"].said.partition("stacks, most recent call first:\n")
        frames = re.findall(r'^  File ".*", line \d+ in (.*)$', stacks, re.MULTILINE)
        self.assertEqual(frames, ["wait_for_nothing", "test_hangs"], "the test's own frames, and none of unittest's")

    def test_a_wait_that_the_request_for_stacks_ends_has_timed_out(self):
        ran = self.run_source(
            """
            import ctypes, unittest
            class WaitTest(unittest.TestCase):
                def test_sleeps(self): ctypes.CDLL(None).sleep(1000)
            """,
            timeout=0.4,
        )
        self.assertEqual(ran.outcomes, {"test_sleeps": "timeout"})
        self.assertIn("in test_sleeps", ran["test_sleeps"].said)

    def test_a_timeout_of_one_rank_is_explained_by_its_ranks(self):
        """Also where its thread cannot be ended, which takes a second more."""
        ran = self.run_source(subject(__file__, "hanging_rank.py"))
        self.assertEqual(set(ran.outcomes.values()), {"timeout"})
        for name in ("test_process", "test_thread"):
            self.assertIn("rank 0 of 1 still running", ran[name].said)

    def test_output_is_kept_and_long_output_is_cut(self):
        ran = self.run_source(
            """
            import os, sys
            class T(unittest.TestCase):
                def test_floods(self):
                    print("the beginning")
                    os.write(1, b"x" * (20 << 20))
                    print("the end", file=sys.stderr)
            """
        )
        output = ran["test_floods"].output
        self.assertEqual(ran.outcomes, {"test_floods": "passed"})
        self.assertTrue(output.startswith("the beginning"), output[:40])
        self.assertTrue(output.endswith("the end\n"), output[-40:])
        self.assertRegex(output, r"\n\.\.\. \d+ bytes cut here \.\.\.\n")
        self.assertLess(len(output), 100_000)

    def test_the_streams_of_the_import_are_those_of_the_test(self):
        """As with pytest's capture: a module may hold them, with text that is not yet written."""
        ran = self.run_source(
            """
            import sys
            out, err = sys.stdout, sys.stderr
            class T(unittest.TestCase):
                def test_same(self):
                    self.assertIs(sys.stdout, out)
                    self.assertIs(sys.stderr, err)
                    out.buffer.write(b"without the end of a line")
                    self.fail()
            """
        )
        self.assertEqual(ran.outcomes, {"test_same": "failed"})
        self.assertIn("without the end of a line", ran["test_same"].output)
        ran = self.run_source(
            """
            import sys
            sys.stdout.close()
            sys.stderr.detach()
            class T(unittest.TestCase):
                def test_others(self):
                    print("to stdout")
                    print("to stderr", file=sys.stderr)
            """
        )
        self.assertEqual(ran["test_others"].output, "to stdout\nto stderr\n")


class TestLeaks(TestCase):
    def test_leftover_processes_are_terminated_and_named(self):
        file = PROJECT.write(subject(__file__, "leftover_processes.py"))
        ran = PROJECT.run(file)
        self.assertEqual(
            ran.outcomes,
            {
                "test_leaks": "leaked",
                "test_leaks_a_fork": "leaked",
                "test_leaks_what_ignores_sigterm": "leaked",
                "test_has_a_helper_that_ends": "passed",
            },
        )
        self.assertIn("sleep 1000", ran["test_leaks"].said)
        self.assertIn("a fork of the test's process", ran["test_leaks_a_fork"].said)
        ignored = "SIGTERM did not end it in 0.2 s, SIGKILL did"
        self.assertIn(ignored, ran["test_leaks_what_ignores_sigterm"].said)
        self.assertNotIn(ignored, ran["test_leaks"].said)
        for name in ("test_leaks", "test_leaks_a_fork", "test_leaks_what_ignores_sigterm"):
            self.assertFalse(is_alive(int(ran[name].output)))

    def test_a_run_leaves_no_descriptors_processes_or_folders(self):
        file = PROJECT.write("import unittest\nclass T(unittest.TestCase):\n    def test(self): pass\n")
        PROJECT.run(file)
        before = (
            open_descriptors(),
            descendants(os.getpid()),
            sorted(PROJECT.preloaded_server.directory.glob("unit*")),
        )
        PROJECT.run(file)
        after = (open_descriptors(), descendants(os.getpid()), sorted(PROJECT.preloaded_server.directory.glob("unit*")))
        self.assertEqual(before, after)


class TestClassFixtures(TestCase):
    def test_tests_that_share_them_share_a_process(self):
        ran = PROJECT.run(
            PROJECT.write(
                """
                import os, unittest
                class T(unittest.TestCase):
                    @classmethod
                    def setUpClass(cls): cls.pid = os.getpid()
                    def check(self): self.assertEqual(self.pid, os.getpid())
                    test_a = test_b = test_c = check
                """
            )
        )
        self.assertEqual(ran.outcomes, dict.fromkeys(("test_a", "test_b", "test_c"), "passed"))
        self.assertEqual(len(ran.recorder.of(events.UnitBegan)), 1)

    def test_the_other_tests_run_when_the_process_dies(self):
        ran = PROJECT.run(
            PROJECT.write(
                """
                import os, signal, unittest
                class T(unittest.TestCase):
                    @classmethod
                    def setUpClass(cls): pass
                    def test_a(self): pass
                    def test_b(self): os.kill(os.getpid(), signal.SIGKILL)
                    def test_c(self): pass
                """
            )
        )
        self.assertEqual(ran.outcomes, {"test_a": "passed", "test_b": "crashed", "test_c": "passed"})

    def test_fixtures_that_fail(self):
        ran = PROJECT.run(PROJECT.write(subject(__file__, "failing_fixtures.py")))
        self.assertEqual(
            ran.outcomes,
            {
                "test_a": "error",
                "test_b": "error",
                "test_c": "passed",
                "test_d": "error",
                "test_e": "skipped",
                "test_f": "crashed",
                "test_g": "crashed",
            },
        )
        self.assertIn("cannot begin", ran["test_b"].said)
        self.assertRegex(ran["test_d"].said, r"tearDownClass \(test_\d+\.After\): ValueError")
        self.assertIn("exited with code 4", ran["test_g"].said)


class TestRetriesAndRepetitions(TestCase):
    def test_a_flaky_test_is_retried(self):
        mark = PROJECT.root / "tries"
        file = PROJECT.write(
            f"""
            import unittest
            class T(unittest.TestCase):
                def test_third(self):
                    with open({str(mark)!r}, "a") as file: file.write("x")
                    with open({str(mark)!r}) as file: self.assertEqual(len(file.read()), 3)
                def test_never(self): self.fail()
            """
        )
        ran = PROJECT.run(file, retries=2)
        self.assertEqual(ran.outcomes, {"test_third": "flaky", "test_never": "failed"})
        self.assertEqual([attempt.number for attempt in ran.attempts["test_third"]], [1, 2, 3])
        self.assertEqual([event.retry for event in ran.recorder.of(events.AttemptEnded)].count(True), 4)

    def test_maxfail_starts_no_more(self):
        file = PROJECT.write(
            "import unittest\nclass T(unittest.TestCase):\n    def fail_(self): self.fail()\n"
            "    test_a = test_b = test_c = test_d = fail_\n"
        )
        ran = PROJECT.run(file, maxfail=2, jobs=1)
        self.assertEqual(len(ran.outcomes), 2)
        self.assertEqual(len(ran.summary.unfinished), 2)
        self.assertEqual([event.reason for event in ran.recorder.of(events.Stopping)], ["2 tests failed"])

    def test_until_failure(self):
        mark = PROJECT.root / "times"
        file = PROJECT.write(
            f"""
            import unittest
            class T(unittest.TestCase):
                def test_fourth(self):
                    with open({str(mark)!r}, "a") as file: file.write("x")
                    with open({str(mark)!r}) as file: self.assertLess(len(file.read()), 4)
            """
        )
        ran = PROJECT.run(file, repeat=Repeat.UNTIL_FAILURE)
        outcomes = [finished.outcome.value for finished in ran.summary.finished]
        self.assertEqual(outcomes, ["passed", "passed", "passed", "failed"])
        self.assertEqual([finished.last.repetition for finished in ran.summary.finished], [0, 1, 2, 3])


def _dedent(source):
    import textwrap

    return textwrap.dedent(source)


if __name__ == "__main__":
    run_tests()
