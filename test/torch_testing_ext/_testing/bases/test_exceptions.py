"""The exceptions for the verdict on ranks: tests that expect PyTorch's types find ours."""

import os
import unittest
from unittest import mock

from kit.outcomes import outcome_of
from kit.ranks import Ranks

from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext.common_distributed import (
    MultiProcessTestCase,
    MultiThreadedTestCase,
    RankError,
    RankFailure,
    spawn_threads_and_init_comms,
)
from torch_testing_ext.common_utils import TestCase, run_tests


class Bodies:
    """Methods have names without `test`, so that no loader collects them."""

    def fails(self):
        self.fail("no")

    def raises(self):
        raise KeyError("k")


class Processes(Bodies, Ranks):
    def exits(self):
        os._exit(3)


class Threads(Bodies, MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()


class Catches:
    """Expects, in the parent, what the ranks of a test raise."""

    expected: type[BaseException]

    def join_or_run(self, fn):
        inner = super().join_or_run(fn).__func__

        def wrapper(self):
            if self.rank != -1:
                inner(self)
                return
            try:
                inner(self)
            except self.expected:
                return

        return wrapper.__get__(self)


class CatchesInProcesses(Catches, Processes): ...


class CatchesInThreads(Catches, Threads): ...


class FailsLater(Processes):
    def tearDown(self):
        super().tearDown()
        self.assertEqual(1, 2)


class Forgetful(MultiProcessTestCase):
    def passes(self): ...


class Decorated(TestCase):
    @spawn_threads_and_init_comms(world_size=2)
    def fails(self):
        self.fail("no")

    @spawn_threads_and_init_comms(world_size=2)
    def raises(self):
        raise KeyError("k")


class TestTypes(TestCase):
    def test_either_is_caught(self):
        for kind in (CatchesInProcesses, CatchesInThreads):
            for expected in (RuntimeError, AssertionError):
                for method in ("fails", "raises", "exits"):
                    if hasattr(kind, method):
                        with (
                            self.subTest(kind=kind, method=method),
                            mock.patch.object(kind, "expected", expected, create=True),
                        ):
                            self.assertEqual(outcome_of(kind(method)), ("passed", ""))

    def test_unittest_still_distinguishes_errors(self):
        for kind in (Processes, Threads, Decorated):
            self.assertEqual(outcome_of(kind("fails")).outcome, "failed")
            self.assertEqual(outcome_of(kind("raises")).outcome, "error")
        self.assertEqual(outcome_of(Processes("exits")).outcome, "error")
        self.assertEqual(outcome_of(Forgetful("passes")).outcome, "error")

    def test_both_outcomes_of_a_test_that_also_fails_in_tear_down(self):
        result = unittest.TestResult()
        FailsLater("raises").run(result)
        self.assertEqual((len(result.errors), len(result.failures)), (1, 1))

    def test_a_failure_exception_of_the_class_is_kept(self):
        class Own(Processes):
            failureException = OSError

        case = Own("raises")
        self.assertEqual(outcome_of(case).outcome, "error")
        self.assertIs(case.failureException, OSError)

    def test_in_the_table_of_their_bases(self):
        self.assertTrue(issubclass(RankFailure, AssertionError) and issubclass(RankFailure, RuntimeError))
        self.assertTrue(issubclass(RankError, AssertionError) and issubclass(RankError, RuntimeError))
        self.assertFalse(issubclass(RankError, RankFailure))
        self.assertIs(TestCase.failureException, AssertionError)
        self.assertIs(ranked_test_case.RankedTestCase.failureException, AssertionError)


if __name__ == "__main__":
    run_tests()
