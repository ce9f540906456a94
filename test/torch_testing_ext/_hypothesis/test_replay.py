"""Properties that replay examples: what they run by default and in a search, and that nothing else decides it."""

import json
import os
import re
import tempfile
from pathlib import Path
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st
from kit.outcomes import AccountsResult
from kit.processes import clean_environ, run_python
from kit.ranks import Ranks
from kit.warm import run_warm

from torch_testing_ext._hypothesis import replayed_examples
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.hypothesis_utils import assume, example, given, replay, settings

ROOT = Path(__file__).parents[3]
LIST_EXAMPLES = Path(__file__).with_name("list_examples.py")
OLDEST = re.compile("^(hypothesis==(.*))$", re.MULTILINE)  # of the versions that we promise
PROFILE = settings(max_examples=3, database=None, derandomize=True)


class Subjects:
    """The tests that the tests below run. They are nested so that no test loader collects them."""

    class Replaying(Ranks):
        @PROFILE
        @replay([("the largest", {"n": 9}), ("the smallest", {"n": 5})])
        @given(n=st.integers(0, 3))
        def check(self, n):
            self.seen = [*getattr(self, "seen", ()), n]

        def runs(self):
            self.check()
            self.assertEqual(self.seen, [9, 5])
            self.check()
            self.assertEqual(self.seen, [9, 5, 9, 5])

        def searches(self):
            self.check()
            self.assertLessEqual(set(self.seen), {0, 1, 2, 3})

        @PROFILE
        @replay([("the largest", {"n": 9})])
        @example(n=7)
        @given(n=st.integers(0, 3))
        def check_with_another(self, n):
            self.seen = [*getattr(self, "seen", ()), n]

        def runs_an_example_of_its_own_too(self):
            self.check_with_another()
            self.assertEqual(sorted(self.seen), [7, 9])

        @PROFILE
        @replay({2: [("on two ranks", {"n": 2})], 4: [("on four ranks", {"n": 4})]})
        @given(n=st.integers(0, 3))
        def runs_those_of_its_ranks(self, n):
            self.assertEqual(n, self.world_size)

        @PROFILE
        @replay([("that all is well", {"n": 0}), ("that 1 is odd", {"n": 1})])
        @given(n=st.integers(0, 3))
        def fails(self, n):
            self.assertEqual(n % 2, 0)

        @PROFILE
        @replay([("too small", {"n": 0}), ("too large", {"n": 3})])
        @given(n=st.integers(0, 3))
        def rejects_all(self, n):
            assume(0 < n < 3)

    class OnFourRanks(Replaying):
        world_size = 4

    class OnThreeRanks(Replaying):
        world_size = 3


def failure_of(test):
    result = AccountsResult()
    test.run(result)
    texts = [text for _, text in result.failures + result.errors]
    return texts[0] if texts else None


class TestReplay(TestCase):
    def test_a_profile_of_the_project_with_our_name_stays(self):
        name, more = "torch_testing_ext_test", hypothesis.settings(max_examples=7)
        with mock.patch.dict(os.environ, HYPOTHESIS_PROFILE=""):
            replayed_examples.choose_search(name)
            usual = hypothesis.settings().max_examples
            self.assertEqual(hypothesis.settings.get_profile(name).max_examples, usual)
            hypothesis.settings.register_profile(name, more)
            replayed_examples.choose_search(name)
            self.assertEqual(hypothesis.settings.get_profile(name).max_examples, 7)

    def test_runs_its_examples_in_order_and_no_others(self):
        for name in ("runs", "runs_an_example_of_its_own_too"):
            with self.subTest(name):
                self.assertIsNone(failure_of(Subjects.Replaying(name)))

    def test_draws_others_in_a_search(self):
        with mock.patch.dict(os.environ, HYPOTHESIS_PROFILE="search"):
            self.assertIsNone(failure_of(Subjects.Replaying("searches")))
            self.assertIn("AssertionError", failure_of(Subjects.Replaying("runs")))

    def test_examples_of_the_number_of_ranks(self):
        self.assertIsNone(failure_of(Subjects.OnFourRanks("runs_those_of_its_ranks")))
        self.assertIn("no example for 3 ranks", failure_of(Subjects.OnThreeRanks("runs_those_of_its_ranks")))

    def test_all_examples_may_not_be_rejected(self):
        report = failure_of(Subjects.Replaying("rejects_all"))
        self.assertIn("Unsatisfiable: the property rejected all 2 examples", report)

    def test_report_says_what_the_example_is_there_for(self):
        report = failure_of(Subjects.Replaying("fails"))
        self.assertIn("fails(n=1) fails on ranks 0, 1", report)
        self.assertIn("In this example (one that every run has: that 1 is odd):", report)
        self.assertNotIn("To repeat", report)


def examples_of_suites(*options, before=""):
    """The version of Hypothesis, and the examples. `before`: what a program does that then becomes the list."""
    become = f"import runpy; runpy.run_path({str(LIST_EXAMPLES)!r}, run_name='__main__')"
    done = run_warm("-c", f"{before}\n{become}", *options, cwd=ROOT, env=clean_environ())
    assert done.returncode == 0, done.stdout + done.stderr
    listed = json.loads(done.stdout)
    return listed["hypothesis"], listed["examples"]


@pytest.mark.slow
class TestSuites(TestCase):
    """What the property suites run by default is in this repository."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # It imports every suite.
        _, cls.plain = examples_of_suites()

    def test_every_property_has_examples_whatever_the_generator_and_the_database(self):
        self.assertGreater(len(self.plain), 30)
        self.assertEqual([name for name, examples in self.plain.items() if not examples], [])
        _, others = examples_of_suites("--without-generator", "--without-database")
        self.assertEqual(others, self.plain)

    @pytest.mark.nightly
    def test_another_version_of_hypothesis_with_network(self):
        with tempfile.TemporaryDirectory() as folder:
            other, number = OLDEST.search((ROOT / ".ci" / "oldest.txt").read_text()).groups()
            installed = run_python("-m", "pip", "install", "--quiet", "--target", folder, other)
            if installed.returncode:
                self.skipTest(f"pip cannot install {other} here: {installed.stderr[-200:]}")
            listed = examples_of_suites(before=f"import sys; sys.path.insert(0, {folder!r})")
            self.assertEqual(listed, (number, self.plain))


if __name__ == "__main__":
    run_tests()
