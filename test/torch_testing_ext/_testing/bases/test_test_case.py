"""TestCase: seeds, restored state, expectations, warnings and logs."""

import logging
import os
import random
import unittest
import warnings
from unittest import mock

import numpy as np
import torch

from torch_testing_ext._machine import flags
from torch_testing_ext.common_utils import NoTest, TestCase, run_tests, set_rng_seed, slowTest


def run_case(test, base=TestCase, **members):
    """Run a function as the test of a new test case."""
    case = type("Case", (base,), {"test_it": test, **members})("test_it")
    result = unittest.TestResult()
    case.run(result)
    return result


class TestThatRunsNothing(TestCase):
    def test_is_an_error(self):
        async def waits(self):
            raise AssertionError

        def yields(self):
            yield
            raise AssertionError

        async def both(self):
            yield
            raise AssertionError

        for test in (waits, yields, both, lambda self: waits(self), lambda self: yields(self)):
            [(_, text)] = run_case(test).errors
            self.assertIn("ran nothing: it is `async def`, or contains `yield`", text)

    def test_one_that_runs_in_a_loop(self):
        ran = []

        async def waits(self):
            ran.append(self)

        result = run_case(waits, base=type("Base", (TestCase, unittest.IsolatedAsyncioTestCase), {}))
        self.assertTrue(result.wasSuccessful())
        self.assertEqual(len(ran), 1)


class TestAroundATest(TestCase):
    def failure(self, result):
        [(_, text)] = result.failures + result.errors
        return text

    def test_every_test_starts_with_the_same_seeds(self):
        drawn = []

        def test_it(self):
            drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))

        run_case(test_it)
        run_case(test_it)
        self.assertEqual(drawn[0], drawn[1])
        set_rng_seed(1234)
        self.assertEqual(drawn[0], (torch.rand(1).item(), random.random(), np.random.rand()))

    def test_grad_mode_is_restored(self):
        def test_it(self):
            torch.set_grad_enabled(False)

        self.assertTrue(run_case(test_it).wasSuccessful())
        self.assertTrue(torch.is_grad_enabled())

    def test_sparse_tensors_are_checked_during_a_test(self):
        enabled = torch.sparse.check_sparse_tensor_invariants.is_enabled
        seen = []
        torch.sparse.check_sparse_tensor_invariants.disable()
        run_case(lambda self: seen.append(enabled()))
        self.assertEqual([*seen, enabled()], [True, False])

    def test_a_leaked_default_device_fails_the_test_and_is_removed(self):
        result = run_case(lambda self: torch.set_default_device("meta"))
        self.assertIn("left 1 torch function mode(s) on", self.failure(result))
        self.assertEqual(torch.empty(1).device.type, "cpu")

    def test_a_wrong_default_dtype_is_found_on_request(self):
        def test_it(self):
            torch.set_default_dtype(torch.float64)
            self.addCleanup(torch.set_default_dtype, torch.float32)

        self.assertTrue(run_case(test_it).wasSuccessful())
        result = run_case(test_it, _default_dtype_check_enabled=True)
        self.assertIn("left torch.float64 as the default dtype", self.failure(result))

    def test_a_set_up_that_does_not_call_ours(self):
        self.assertTrue(run_case(lambda self: None, setUp=lambda self: None).wasSuccessful())

    def test_method_name_by_either_keyword(self):
        class Case(TestCase):
            def test_it(self):
                pass

        for case in (Case("test_it"), Case(method_name="test_it"), Case(methodName="test_it")):
            self.assertEqual(case.id().rpartition(".")[2], "test_it")

    def test_fast_tests_are_skipped_on_request(self):
        self.addCleanup(flags.flag.cache_clear)
        flags.flag.cache_clear()
        with mock.patch.dict(os.environ, PYTORCH_TEST_SKIP_FAST="1", PYTORCH_TEST_WITH_SLOW="1"):
            ran = []
            result = run_case(lambda self: ran.append("fast"))
            self.assertEqual(len(result.skipped), 1)
            run_case(slowTest(lambda self: ran.append("slow")))
        self.assertEqual(ran, ["slow"])

    def test_pytest_does_not_collect_no_test(self):
        self.assertIs(NoTest.__test__, False)


class TestExpectations(TestCase):
    def test_inline(self):
        self.assertExpectedInline("abc", """abc""")
        self.assertExpectedInline([1, 2], """[1, 2]""")
        self.assertExpectedInline("\x1b[31mred\x1b[0m", """red""")
        self.assertExpectedInline("# note\na\n\n  \nb", "a\nb", ignore_comments=True, ignore_empty_lines=True)

    def test_inline_differs(self):
        for actual, options in (("abd", {}), ("# note\nabc", {}), ("\nabc", {"ignore_comments": True})):
            with mock.patch.dict(os.environ, EXPECTTEST_ACCEPT=""), self.assertRaises(AssertionError):
                self.assertExpectedInline(actual, """abc""", **options)

    def test_a_process_that_may_not_accept_rewrites_nothing(self):
        class OtherRank(TestCase):
            def _accepts_expected(self):
                return False

        with mock.patch.dict(os.environ, EXPECTTEST_ACCEPT="1"), open(__file__) as file:
            before = file.read()
            OtherRank().assertExpectedInline("new", """old""")
            file.seek(0)
            self.assertEqual(file.read(), before)
        with mock.patch.dict(os.environ, EXPECTTEST_ACCEPT=""), self.assertRaises(AssertionError):
            OtherRank().assertExpectedInline("new", """old""")


class TestWarningsAndLogs(TestCase):
    def test_not_warn(self):
        self.assertNotWarn(lambda: None)
        with self.assertRaisesRegex(AssertionError, "it warned: .*boo"):
            self.assertNotWarn(lambda: warnings.warn("boo", stacklevel=1))
        with self.assertRaisesRegex(AssertionError, "mine"):
            self.assertNotWarn(lambda: warnings.warn("boo", stacklevel=1), "mine")

    def test_warns_once(self):
        with self.assertWarnsOnceRegex(UserWarning, "bo+"):
            warnings.warn("booo", stacklevel=1)

    def test_warns_once_fails(self):
        for warning, text in (
            (None, "no warning caught"),
            (RuntimeWarning("boo"), "no UserWarning"),
            ("x", "matches none"),
        ):
            with self.assertRaisesRegex(AssertionError, text), self.assertWarnsOnceRegex(UserWarning, "bo+"):
                if warning is not None:
                    warnings.warn(warning, stacklevel=1)

    def test_warnings_that_torch_gives_once_are_given_every_time(self):
        before = torch.is_warn_always_enabled()
        with self.assertWarnsOnceRegex(UserWarning):
            self.assertTrue(torch.is_warn_always_enabled())
            warnings.warn("boo", stacklevel=1)
        self.assertEqual(torch.is_warn_always_enabled(), before)

    def test_logs_are_torchs_by_default(self):
        with self.assertLogs() as caught:
            logging.getLogger("torch.kit").warning("hello")
        self.assertEqual(caught.output, ["WARNING:torch.kit:hello"])
        with self.assertRaises(AssertionError), self.assertNoLogs():
            logging.getLogger("torch.kit").warning("hello")
        with self.assertNoLogs():
            logging.getLogger("elsewhere").debug("hello")

    def test_unraisable(self):
        class Loud:
            def __del__(self):
                raise ValueError("in a destructor")

        self.assertNoUnraisable(list)
        with self.assertRaisesRegex(AssertionError, "in a destructor"):
            self.assertNoUnraisable(lambda: Loud() and None)


if __name__ == "__main__":
    run_tests()
