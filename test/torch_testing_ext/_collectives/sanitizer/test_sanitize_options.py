"""How checks are asked for: by names of kinds, which must be known, on a test, a class, the environment or pytest."""

import os
import re
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from kit.files import subject
from kit.warm import run_torchtest, run_warm

from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import ALL, DEFAULT, SanitizeKind, read_kinds
from torch_testing_ext._testing.marks.settings_of_tests import kinds_of_test, sanitize
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import launch_settings
from torch_testing_ext.launch.aspects import ASPECTS
from torch_testing_ext.launch.attempts import ProcessHost, RankAttempt, TestPlan
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.verdict import Case

ROOT = Path(__file__).parents[4]


MANY_STEPS = subject(__file__, "many_steps.py")


class ProcessRanks(ProcessHost):
    kind = HostKind.FRESH


class SanitizeOptionsTest(unittest.TestCase):
    def test_kinds(self):
        self.assertEqual(read_kinds("all"), ALL)
        self.assertEqual(read_kinds("default"), DEFAULT)
        self.assertEqual(read_kinds("nan, poison"), {SanitizeKind.NAN, SanitizeKind.POISON, SanitizeKind.CALLS})

    def test_an_unknown_kind_suggests_the_nearest(self):
        for call in (lambda: read_kinds("nans"), lambda: sanitize("nans")):
            with self.assertRaisesRegex(ValueError, "'nans' is not a kind of check. Did you mean: nan"):
                call()
        with self.assertRaisesRegex(
            ValueError, "SANITIZE='nans' is not valid; use kinds .*: calls, order, .*, default"
        ):
            launch_settings.check_settings({"TORCH_TESTING_EXT_SANITIZE": "nans"})

    def test_the_decorator_has_to_be_called(self):
        with self.assertRaisesRegex(ValueError, "has to be called"):
            sanitize(lambda self: None)

    def test_kinds_of_a_test_and_its_class(self):
        @sanitize("poison")
        class T(unittest.TestCase):
            @sanitize("nan")
            def test_it(self): ...

            def test_other(self): ...

        self.assertEqual(kinds_of_test(T("test_it")), ("nan", "poison"))
        self.assertEqual(kinds_of_test(T("test_other")), ("poison",))

    def test_settings(self):
        chosen = {
            "TORCH_TESTING_EXT_SANITIZE": "nan",
            "TORCH_TESTING_EXT_SANITIZE_ORDER": "fail",
            "TORCH_TESTING_EXT_DELAYS": "7",
        }
        plan = TestPlan(Case("a test"), 2, kinds=["poison"])
        with mock.patch.dict(os.environ, chosen):
            attempt = RankAttempt(ProcessRanks(), plan, ASPECTS)
            attempt.prepare()
        found = attempt.sanitize
        self.assertEqual(found.kinds, {SanitizeKind.CALLS, SanitizeKind.NAN, SanitizeKind.POISON})
        self.assertTrue(found.fails_for_order)
        self.assertEqual(found.delays, 7)
        attempt = RankAttempt(ProcessRanks(), replace(plan, kinds=()), ASPECTS)
        attempt.prepare()
        self.assertFalse(attempt.sanitize)

    @pytest.mark.slow
    def test_replicas_that_are_not_compared_any_more(self):
        """Once the digests take too much room, a warning says so."""
        code, said = self.run_in(MANY_STEPS, "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
        self.assertEqual(code, 0, said)
        self.assertEqual(
            len(re.findall(r"RuntimeWarning: replicas are not compared from here on: .*test_it\.py", said)), 1
        )

    def run_in(self, text, *command):
        return self.run_by(run_warm, text, "-m", *command)

    def run_torchtest(self, text, *options):
        return self.run_by(run_torchtest, text, "-o", "tests=.", "test_it.py", "--cache", "cache", *options)

    def run_by(self, run, text, *words):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_it.py").write_text(text)
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = run(*words, cwd=folder, env=env)
        return done.returncode, done.stdout + done.stderr

    def test_pytest(self):
        command = ["pytest", "-q", "-p", "no:cacheprovider", "-p", "torch_testing_ext.pytest_plugin", "test_it.py"]
        code, said = self.run_in(MISMATCH, *command, "--sanitize=calls")
        self.assertEqual(code, 1, said)
        self.assertIn("rank 1 calls all_reduce [4] float32 max", said)
        code, said = self.run_in(MISMATCH, *command, "--sanitize=nans")
        self.assertIn("'nans' is not a kind of check. Did you mean: nan", said)
        self.assertNotEqual(code, 0)

    @pytest.mark.slow
    def test_run_test(self):
        code, said = self.run_torchtest(MISMATCH, "--sanitize")
        self.assertEqual(code, 1, said)
        self.assertIn("rank 1 calls all_reduce [4] float32 max", said)
        self.assertIn("python -m torch_testing_ext --sanitize=default --cache cache test_it.py::T::test_it", said)
        code, said = self.run_torchtest(MISMATCH, "--sanitize=nans")
        self.assertEqual(code, 4, said)
        self.assertIn("'nans' is not a kind of check. Did you mean: nan", said)

    @pytest.mark.slow
    def test_run_test_warns_of_a_test_that_passes(self):
        code, said = self.run_torchtest(CROSSED, "--sanitize")
        self.assertEqual(code, 0, said)
        for name in ("test_it.T.test_it", "test_marked"):
            self.assertIn(f"warning: {name}: ranks 0, 1 issue collectives in opposite orders: rank 0 issues", said)
        self.assertIn("2 passed", said)

    @pytest.mark.slow
    def test_run_test_warns_once_of_what_each_process_says(self):
        """Of one thing that is said with other reasons, too; of each test for itself."""
        code, said = self.run_torchtest(TALKATIVE)
        self.assertEqual(code, 0, said)
        live, _, summary = said.partition("2 passed in")
        for part in (live, summary):
            self.assertEqual(part.count("warning: ranks are slow, because of Thread-"), 1, said)
            self.assertEqual(part.count("warning: it differs"), 1, said)
            self.assertNotIn("just output", part)
            for name in ("a", "b"):
                self.assertEqual(part.count(f"warning: test_{name}: something"), 1, said)

    def test_nothing_is_loaded_without_it(self):
        """Neither in the ranks nor in their parent."""
        code, said = self.run_in(UNLOADED, "test_it")
        self.assertEqual(code, 0, said)

    @pytest.mark.slow
    def test_delays(self):
        """The same seed gives the same delays, and each run of a test another seed."""
        code, said = self.run_torchtest(DELAYED, "--repeat=3", "--delays=8")
        self.assertEqual(code, 1, said)
        delays = set(re.findall("AssertionError: delays (.*)", said))
        self.assertEqual(len(delays), 3, said)
        for seed in (8, 9, 10):
            self.assertIn(f"--delays={seed} test_it.py::T::test_it", said)
        _, again = self.run_torchtest(DELAYED, "--delays=9")
        self.assertLess(set(re.findall("AssertionError: delays (.*)", again)), delays)


MISMATCH = subject(__file__, "mismatch.py")
CROSSED = subject(__file__, "crossed_groups.py")
TALKATIVE = """
import unittest, sys
from torch_testing_ext._tests.notes import warn_user
class T(unittest.TestCase):
    def say(self, number):
        warn_user("ranks are slow", f"of Thread-{number}")
        warn_user("it differs")
        warn_user(f"{self._testMethodName}: something")
        print("torch_testing_ext: just output", file=sys.stderr)
    def test_a(self): self.say(1)
    def test_b(self): self.say(2)
"""
UNLOADED = subject(__file__, "unloaded_sanitizer.py")
# Notes the delays instead of waiting.
DELAYED = subject(__file__, "noted_delays.py")


if __name__ == "__main__":
    run_tests()
