"""addCleanup, subTest and run_subtests inside a test method, in the ranks."""

import itertools
import os
import sys
import unittest
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from kit.outcomes import outcome_of
from kit.ranks import Ranks, outcome_and_told, ranks_told

from torch_testing_ext.common_distributed import TEST_SKIPS, run_subtests
from torch_testing_ext.common_utils import TestCase, run_tests

SKIP = TEST_SKIPS["generic"].exit_code


class Odd(Exception):
    """Ignores its arguments."""

    def __str__(self):
        return "very odd"


class CleanUps(Ranks):
    def note(self, *words, **named):
        with open(os.path.join(os.environ["TELL"], f"{self.rank}.txt"), "a") as file:
            print(*words, *(f"{key}={value}" for key, value in named.items()), file=file)

    def raise_this(self, error):
        self.note("raises", type(error).__name__)
        raise error

    def in_reverse(self):
        self.addCleanup(self.note, "first")
        self.addCleanup(self.note, "second", 2, three=3)
        self.note("body")

    def after_a_failure(self):
        self.addCleanup(self.note, "cleaned")
        self.fail("the body's")

    def after_a_skip(self):
        self.addCleanup(self.note, "cleaned")
        self.skipTest("the body's")

    def fails_in_clean_up(self):
        self.addCleanup(self.note, "first")
        self.addCleanup(self.raise_this, KeyError("the clean-up's"))
        self.addCleanup(self.note, "third")

    def fails_in_clean_up_by_assertion(self):
        self.addCleanup(self.assertEqual, 1, 2)

    def fails_in_body_and_clean_up(self):
        self.addCleanup(self.note, "first")
        self.addCleanup(self.raise_this, KeyError("the clean-up's"))
        self.fail("the body's")

    def fails_in_two_clean_ups(self):
        self.addCleanup(self.raise_this, ValueError("the later"))
        self.addCleanup(self.raise_this, KeyError("the earlier"))

    def adds_in_clean_up(self):
        self.addCleanup(lambda: (self.note("outer"), self.addCleanup(self.note, "inner")))

    def skips_in_clean_up(self):
        self.addCleanup(self.skipTest, "the clean-up's")

    def skips_and_fails_in_clean_up(self):
        self.addCleanup(self.raise_this, KeyError("the clean-up's"))
        self.skipTest("the body's")

    def skips_and_fails_in_two_clean_ups(self):
        self.addCleanup(self.raise_this, KeyError("the later"))
        self.addCleanup(self.skipTest, "the earlier")

    def fails_in_body_and_exits_in_clean_up(self):
        self.addCleanup(sys.exit, SKIP)
        self.fail("the body's")

    def fails_and_exits_in_two_clean_ups(self):
        self.addCleanup(self.fail, "the later")
        self.addCleanup(sys.exit, 0)

    def exits_in_body_and_fails_in_clean_up(self):
        self.addCleanup(self.fail, "the clean-up's")
        sys.exit(SKIP)

    def fails_in_body_and_dies_in_clean_up(self):
        self.addCleanup(os._exit, 3)
        self.fail("the body's")

    def by_context(self):
        @contextmanager
        def context():
            self.note("enter")
            yield "value"
            self.note("leave")

        self.assertEqual(self.enterContext(context()), "value")
        self.note("body")

    def by_hand(self):
        self.addCleanup(self.note, "cleaned")
        self.doCleanups()
        self.note("body goes on")


class TestCleanUps(TestCase):
    def run_noted(self, method):
        test = CleanUps(method)
        seen, told = self._outcome_and_lines(test)
        for lines in told:
            self.assertEqual(lines, told[0])
        return seen, told[0] if told else []

    def _outcome_and_lines(self, test):
        lines = []
        original = test.tearDown

        def tear_down():
            for file in sorted(Path(os.environ["TELL"]).glob("*.txt")):
                lines.append(file.read_text().splitlines())
                file.unlink()
            original()

        test.tearDown = tear_down
        seen, _ = outcome_and_told(test)
        return seen, lines

    def test_order_and_arguments(self):
        seen, lines = self.run_noted("in_reverse")
        self.assertEqual(seen.outcome, "passed", seen.message)
        self.assertEqual(lines, ["body", "second 2 three=3", "first"])

    def test_also_after_a_failure_or_skip(self):
        for method, outcome in (("after_a_failure", "failed"), ("after_a_skip", "skipped")):
            seen, lines = self.run_noted(method)
            self.assertEqual((seen.outcome, lines), (outcome, ["cleaned"]), seen.message)
            self.assertIn("the body's", seen.message)

    def test_an_error_in_clean_up_fails_the_test_and_the_other_clean_ups_run(self):
        seen, lines = self.run_noted("fails_in_clean_up")
        self.assertEqual(seen.outcome, "error", seen.message)
        self.assertEqual(lines, ["third", "raises KeyError", "first"])
        self.assertIn('KeyError: "the clean-up\'s"', seen.message)
        self.assertIn("in raise_this", seen.message)

    def test_an_assertion_in_clean_up(self):
        self.assertEqual(outcome_of(CleanUps("fails_in_clean_up_by_assertion")).outcome, "failed")

    def test_the_error_of_the_body_takes_precedence(self):
        seen, lines = self.run_noted("fails_in_body_and_clean_up")
        self.assertEqual((seen.outcome, lines), ("failed", ["raises KeyError", "first"]), seen.message)
        self.assertIn("AssertionError: the body's", seen.message)
        self.assertNotIn("KeyError: ", seen.message)  # the excerpt of the source has the word without a colon

    def test_the_first_of_two_errors_is_reported(self):
        seen, lines = self.run_noted("fails_in_two_clean_ups")
        self.assertEqual((seen.outcome, lines), ("error", ["raises KeyError", "raises ValueError"]))
        self.assertIn("the earlier", seen.message)

    def test_added_during_clean_up(self):
        self.assertEqual(self.run_noted("adds_in_clean_up")[1], ["outer", "inner"])

    def test_a_skip_hides_no_error_in_clean_up(self):
        for method in ("skips_and_fails_in_clean_up", "skips_and_fails_in_two_clean_ups"):
            seen, lines = self.run_noted(method)
            self.assertEqual((seen.outcome, lines), ("error", ["raises KeyError"]), seen.message)

    def test_an_exit_hides_no_error(self):
        for method, whose in (
            ("fails_in_body_and_exits_in_clean_up", "the body's"),
            ("fails_and_exits_in_two_clean_ups", "the later"),
            ("exits_in_body_and_fails_in_clean_up", "the clean-up's"),
        ):
            seen = outcome_of(CleanUps(method))
            self.assertEqual(seen.outcome, "failed", seen.message)
            self.assertIn(f"AssertionError: {whose}", seen.message)

    def test_a_rank_that_dies_in_clean_up_tells_its_failure(self):
        seen = outcome_of(CleanUps("fails_in_body_and_dies_in_clean_up"))
        self.assertIn("exited with code 3", seen.message)
        self.assertIn("before that: the test had failed: AssertionError: the body's", seen.message)

    def test_a_skip_in_clean_up(self):
        self.assertEqual(outcome_of(CleanUps("skips_in_clean_up")), ("skipped", "the clean-up's"))

    @unittest.skipUnless(hasattr(unittest.TestCase, "enterContext"), "enterContext came with Python 3.11")
    def test_by_context(self):
        self.assertEqual(self.run_noted("by_context")[1], ["enter", "body", "leave"])

    def test_by_hand(self):
        seen, lines = self.run_noted("by_hand")
        self.assertEqual((seen.outcome, lines), ("passed", ["cleaned", "body goes on"]), seen.message)


class SubTests(Ranks):
    def all_pass(self):
        seen = []
        for size in (1, 2):
            with self.subTest(size=size):
                seen.append(size)
        self.tell(seen)

    def one_fails(self):
        for size in (1, 2, 3):
            with self.subTest("at size", size=size, kind="a"):
                self.assertNotEqual(size, 2)
                print("done with", size)

    def nested(self):
        with self.subTest(outer=1), self.subTest(inner=2):
            self.fail("deep inside")

    def raises_by_number(self):
        errors = (KeyError("k"), FileNotFoundError(2, "No such file", "x"), Odd(1), ValueError(), StopIteration(3))
        with self.subTest(number=7):
            raise errors[int(os.environ["NUMBER"])]

    def one_skips(self):
        seen = []
        for size in (1, 2, 3):
            with self.subTest(size=size):
                if size == 2:
                    self.skipTest("not two")
                seen.append(size)
        self.tell(seen)

    def handled_outside(self):
        try:
            with self.subTest(size=1):
                raise KeyError("k")
        except KeyError:
            pass
        raise ValueError("another")

    def without_parameters(self):
        with self.subTest():
            self.fail("inside")

    def in_one_rank(self):
        for size in (1, 2):
            with self.subTest(size=size):
                self.assertEqual(self.rank * size, 0)


class TestSubTests(TestCase):
    def failure_of(self, method, outcome="failed"):
        seen = outcome_of(SubTests(method))
        self.assertEqual(seen.outcome, outcome, seen.message)
        return seen.message

    def test_passing(self):
        self.assertEqual(ranks_told(SubTests("all_pass")), [[1, 2], [1, 2]])

    def test_the_failure_names_the_parameters(self):
        message = self.failure_of("one_fails")
        self.assertIn("in subtest [at size] (size=2, kind='a')", message.splitlines()[0])

    def test_a_failure_ends_the_test(self):
        message = self.failure_of("one_fails")
        self.assertIn("done with 1", message)
        self.assertNotIn("done with 3", message)

    def test_only_the_failing_rank_names_them(self):
        message = self.failure_of("in_one_rank")
        self.assertIn("rank 1 of 2 failed", message)
        self.assertIn("(size=1)", message)

    def test_nested(self):
        first_line = self.failure_of("nested").splitlines()[0]
        self.assertLess(first_line.index("(outer=1)"), first_line.index("(inner=2)"))

    def test_whatever_the_exception(self):
        said = ["KeyError", "No such file", "very odd", "ValueError", "StopIteration"]
        for number, text in enumerate(said):
            with self.subTest(text=text):
                os.environ["NUMBER"] = str(number)
                self.addCleanup(os.environ.pop, "NUMBER", None)
                first_line = self.failure_of("raises_by_number", "error").splitlines()[0]
                self.assertIn("in subtest (number=7)", first_line)
                self.assertIn(text, first_line)

    def test_a_skip_skips_the_subtest_alone(self):
        self.assertEqual(ranks_told(SubTests("one_skips")), [[1, 3], [1, 3]])

    def test_a_later_failure_does_not_name_the_subtest(self):
        self.assertNotIn("size=1", self.failure_of("handled_outside", "error").splitlines()[0])

    def test_without_parameters(self):
        self.assertIn("inside", self.failure_of("without_parameters").splitlines()[0])

    def test_the_parent_uses_unittests_own_subtests(self):
        class Plain(Ranks):
            def setUp(self):
                unittest.TestCase.setUp(self)
                self.rank = self.MAIN_PROCESS_RANK

            def tearDown(self):
                pass

            def runTest(self):
                for size in (1, 2, 3):
                    with self.subTest("message", size=size):
                        self.assertEqual(size, 2)

        test = Plain()
        test.runTest = Plain.runTest.__get__(test)
        result = unittest.TestResult()
        test.run(result)
        self.assertEqual(
            [case._subDescription() for case, _ in result.failures], ["[message] (size=1)", "[message] (size=3)"]
        )


class RunSubtests(Ranks):
    CONFIG = {"a": [1, 2], "b": ["x", "y"]}  # noqa: RUF012 - the form that suites write

    def all_combinations(self):
        self.join_group()
        calls = []
        run_subtests(self, self.CONFIG, lambda *args, **kwargs: calls.append([args, kwargs]), "given", more=3)
        self.tell(calls)

    def one_fails(self):
        self.join_group()

        def check(a, b):
            self.assertFalse(a == 2 and b == "x")

        run_subtests(self, self.CONFIG, check)

    def ranks_keep_step(self):
        """The ranks wait for each other after every combination: none is more than one ahead."""
        self.join_group()
        store = dist.FileStore(self.file_name + "-steps", self.world_size)
        numbers = itertools.count(1)

        def check(a, b):
            number = next(numbers)
            store.set(f"{self.rank}-{number}", "here")
            if number > 1:
                self.assertTrue(store.check([f"{1 - self.rank}-{number - 1}"]))

        run_subtests(self, self.CONFIG, check)

    def nothing_to_combine(self):
        self.join_group()
        calls = []
        run_subtests(self, {}, lambda: calls.append("once"))
        self.tell(calls)

    def collectives_in_each(self):
        self.join_group()

        def check(size):
            tensor = torch.ones(size)
            dist.all_reduce(tensor)
            self.assertEqual(tensor, torch.full((size,), 2.0))

        run_subtests(self, {"size": [1, 5]}, check)


class TestRunSubtests(TestCase):
    def test_all_combinations(self):
        combinations = [(a, b) for a in (1, 2) for b in ("x", "y")]
        calls = [[["given"], {"more": 3, "a": a, "b": b}] for a, b in combinations]
        self.assertEqual(ranks_told(RunSubtests("all_combinations")), [calls, calls])

    def test_the_failure_names_the_combination(self):
        seen = outcome_of(RunSubtests("one_fails"))
        self.assertEqual(seen.outcome, "failed")
        self.assertIn("(a=2, b='x')", seen.message.splitlines()[0])

    def test_ranks_keep_step(self):
        self.assertEqual(outcome_of(RunSubtests("ranks_keep_step")), ("passed", ""))

    def test_nothing_to_combine(self):
        self.assertEqual(ranks_told(RunSubtests("nothing_to_combine")), [["once"], ["once"]])

    def test_collectives_in_each(self):
        self.assertEqual(outcome_of(RunSubtests("collectives_in_each")), ("passed", ""))


if __name__ == "__main__":
    run_tests()
