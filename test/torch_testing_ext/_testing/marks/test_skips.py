"""Decorators that skip a test, or expect it to fail, by a flag."""

import io
import unittest
from types import FunctionType
from unittest import mock

import torch

from torch_testing_ext import common_utils
from torch_testing_ext._machine import accelerators, flags
from torch_testing_ext._testing.marks import skips_by_architecture
from torch_testing_ext._testing.marks.skips import skip_for
from torch_testing_ext.common_distributed import requires_world_size
from torch_testing_ext.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    lazy_skip_if,
    parametrize,
    run_tests,
    skip_but_pass_in_sandcastle,
    skip_but_pass_in_sandcastle_if,
    skipIfHpu,
    skipIfRocm,
    skipIfTorchDynamo,
    skipIfWindows,
    skipIfXpu,
    slowTest,
    xfail_inherited_tests,
    xfailIf,
)


def copy_of(function):
    return FunctionType(function.__code__, function.__globals__, function.__name__)


def run_function(test):
    result = unittest.TestResult()
    type("Case", (TestCase,), {"test_it": test})("test_it").run(result)
    return result


def skip_reason(result):
    return result.skipped[0][1] if result.skipped else None


@instantiate_parametrized_tests
class TestSkips(TestCase):
    @parametrize("decorator", [requires_world_size(99), skip_for(lambda test: "requires nothing")])
    def test_a_class_stays_one(self, decorator):
        class Base(TestCase):
            def test_inherited(self): ...

        @decorator
        class Derived(Base):
            def test_own(self): ...

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Derived).run(result)
        self.assertEqual([reason.partition(" ")[0] for _, reason in result.skipped], ["requires"] * 2)
        unittest.defaultTestLoader.loadTestsFromTestCase(Base).run(result)
        self.assertEqual((result.testsRun, len(result.skipped)), (3, 2))

    def with_flags(self, **values):
        patch = mock.patch.dict(flags._FLAGS, {name: lambda value=value: value for name, value in values.items()})
        patch.start()
        flags.flag.cache_clear()
        self.addCleanup(flags.flag.cache_clear)
        self.addCleanup(patch.stop)

    @parametrize(
        "decorator,flag",
        [
            (skipIfRocm, "TEST_WITH_ROCM"),
            (skipIfRocm(msg="why"), "TEST_WITH_ROCM"),
            (skipIfXpu, "TEST_XPU"),
            (skipIfHpu, "TEST_HPU"),
            (skipIfWindows, "IS_WINDOWS"),
            (skipIfTorchDynamo(), "TEST_WITH_TORCHDYNAMO"),
        ],
    )
    def test_by_flag(self, decorator, flag):
        ran = []

        @decorator
        def test_it(self):
            ran.append(self)

        class Case(TestCase):
            def test_it(self):
                ran.append(self)

        self.with_flags(**{flag: False})
        self.assertIsNone(skip_reason(run_function(test_it)))
        self.assertEqual(len(ran), 1)
        self.with_flags(**{flag: True})
        self.assertIsNotNone(skip_reason(run_function(test_it)))
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(decorator(Case)).run(result)
        self.assertEqual([len(ran), result.testsRun, len(result.skipped)], [1, 1, 1])

    def test_the_flag_is_read_when_the_test_runs(self):
        asked = mock.Mock(return_value=False)
        test = lazy_skip_if(asked, "reason")(lambda self: None)
        asked.assert_not_called()
        run_function(test)
        asked.assert_called_once_with()

    def test_reasons(self):
        self.with_flags(TEST_WITH_ROCM=True, TEST_WITH_TORCHDYNAMO=True)
        self.assertEqual(skip_reason(run_function(skipIfRocm(msg="no hip")(lambda self: None))), "skipIfRocm: no hip")
        self.assertEqual(skip_reason(run_function(skipIfTorchDynamo("no graph")(lambda self: None))), "no graph")

    def test_dynamo_without_parentheses_is_refused(self):
        with self.assertRaises(ValueError):
            skipIfTorchDynamo(lambda self: None)

    def test_slow(self):
        self.with_flags(TEST_WITH_SLOW=False)
        self.assertIn("test is slow", skip_reason(run_function(slowTest(lambda self: None))))
        self.with_flags(TEST_WITH_SLOW=True)
        self.assertIsNone(skip_reason(run_function(slowTest(lambda self: None))))

    def test_sandcastle(self):
        def test_it(self):
            raise ValueError("must not run")

        self.with_flags(IS_SANDCASTLE=False)
        skipped = run_function(skip_but_pass_in_sandcastle("why")(copy_of(test_it)))
        self.assertEqual(skip_reason(skipped), "why")
        self.with_flags(IS_SANDCASTLE=True)
        with mock.patch("sys.stderr", io.StringIO()) as stderr:
            passed = run_function(skip_but_pass_in_sandcastle_if(True, "why")(copy_of(test_it)))
        self.assertTrue(passed.wasSuccessful() and not passed.skipped)
        self.assertIn("why", stderr.getvalue())
        self.assertEqual(len(run_function(skip_but_pass_in_sandcastle_if(False, "why")(test_it)).errors), 1)

    def test_expected_failures(self):
        def test_it(self):
            raise ValueError

        self.assertEqual(len(run_function(xfailIf(True)(copy_of(test_it))).expectedFailures), 1)
        self.assertEqual(len(run_function(xfailIf(False)(test_it)).errors), 1)

    def test_inherited_expected_failures(self):
        class Base(TestCase):
            def test_it(self):
                self.assertTrue(self.good)

            good = True

        @xfail_inherited_tests(["test_it"])
        class Derived(Base):
            good = False

        for cls, expected in ((Base, 0), (Derived, 1)):
            result = unittest.TestResult()
            cls("test_it").run(result)
            self.assertEqual([result.wasSuccessful(), len(result.expectedFailures)], [True, expected])

    def test_peer_access(self):
        for has_access in (True, False):
            with mock.patch.object(accelerators, "peers_have_access", lambda has_access=has_access: has_access):
                result = run_function(common_utils.requires_cuda_p2p_access()(lambda self: None))
            self.assertEqual(bool(result.skipped), not has_access)

    def test_rocm_version(self):
        self.with_flags(TEST_WITH_ROCM=True)
        with mock.patch.object(torch.version, "hip", "6.4.43482-0f2d60242"):
            self.assertEqual(skips_by_architecture.getRocmVersion(), (6, 4, 43482))
            for version, skipped in (((6, 5), True), ((6, 4), False), (None, True)):
                test = common_utils.skipIfRocmVersionLessThan(version)(lambda self: None)
                self.assertEqual(bool(run_function(test).skipped), skipped)


if __name__ == "__main__":
    run_tests()
