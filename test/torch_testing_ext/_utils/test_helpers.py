"""Skips, contexts, ports, seeds and the small helpers."""

import gc
import io
import os
import random
import signal
import socket
import sys
import time
import unittest
import warnings
from unittest import mock

import torch

from torch_testing_ext import common_utils
from torch_testing_ext._machine import accelerators, flags, ports
from torch_testing_ext._marks import hardware
from torch_testing_ext.common_utils import (
    DeterministicGuard,
    LazyVal,
    TemporaryDirectoryName,
    TemporaryFileName,
    TestCase,
    check_leaked_tensors,
    clone_input_helper,
    copy_func,
    disable_gc,
    find_free_port,
    freeze_rng_state,
    get_cycles_per_ms,
    gradcheck,
    instantiate_parametrized_tests,
    lazy_skip_if,
    load_tests as load_tests_of_script,
    mock_wrapper,
    noncontiguous_like,
    parametrize,
    patch_test_members,
    retry_on_connect_failures,
    run_tests,
    set_cwd,
    set_default_dtype,
    set_rng_seed,
    skip_but_pass_in_sandcastle,
    skip_but_pass_in_sandcastle_if,
    skipIfHpu,
    skipIfRocm,
    skipIfTorchDynamo,
    skipIfWindows,
    skipIfXpu,
    slowTest,
    suppress_warnings,
    xfail_inherited_tests,
    xfailIf,
)


def run_function(test):
    result = unittest.TestResult()
    type("Case", (TestCase,), {"test_it": test})("test_it").run(result)
    return result


def skip_reason(result):
    return result.skipped[0][1] if result.skipped else None


@instantiate_parametrized_tests
class TestSkips(TestCase):
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

    def test_the_flag_is_asked_for_when_the_test_runs(self):
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
        skipped = run_function(skip_but_pass_in_sandcastle("why")(copy_func(test_it)))
        self.assertEqual(skip_reason(skipped), "why")
        self.with_flags(IS_SANDCASTLE=True)
        with mock.patch("sys.stderr", io.StringIO()) as stderr:
            passed = run_function(skip_but_pass_in_sandcastle_if(True, "why")(copy_func(test_it)))
        self.assertTrue(passed.wasSuccessful() and not passed.skipped)
        self.assertIn("why", stderr.getvalue())
        self.assertEqual(len(run_function(skip_but_pass_in_sandcastle_if(False, "why")(test_it)).errors), 1)

    def test_expected_failures(self):
        def test_it(self):
            raise ValueError

        self.assertEqual(len(run_function(xfailIf(True)(copy_func(test_it))).expectedFailures), 1)
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
            self.assertEqual(hardware.getRocmVersion(), (6, 4))
            for version, skipped in (((6, 5), True), ((6, 4), False), (None, True)):
                test = common_utils.skipIfRocmVersionLessThan(version)(lambda self: None)
                self.assertEqual(bool(run_function(test).skipped), skipped)


class TestContexts(TestCase):
    def test_default_dtype(self):
        with self.assertRaises(KeyError), set_default_dtype(torch.float64):
            self.assertEqual(torch.ones(1).dtype, torch.float64)
            raise KeyError
        self.assertEqual(torch.ones(1).dtype, torch.float32)

    def test_deterministic(self):
        before = torch.are_deterministic_algorithms_enabled()
        with DeterministicGuard(True, warn_only=True, fill_uninitialized_memory=False):
            self.assertTrue(torch.are_deterministic_algorithms_enabled())
            self.assertTrue(torch.is_deterministic_algorithms_warn_only_enabled())
            self.assertFalse(torch.utils.deterministic.fill_uninitialized_memory)
        self.assertEqual(torch.are_deterministic_algorithms_enabled(), before)
        self.assertFalse(torch.is_deterministic_algorithms_warn_only_enabled())
        self.assertTrue(torch.utils.deterministic.fill_uninitialized_memory)

    def test_random_state(self):
        set_rng_seed(5)
        expected = torch.rand(2)
        set_rng_seed(5)
        with freeze_rng_state():
            torch.rand(10)
        self.assertEqual(torch.rand(2), expected, rtol=0, atol=0)

    def test_gc(self):
        with disable_gc():
            self.assertFalse(gc.isenabled())
        self.assertTrue(gc.isenabled())

    def test_cwd(self):
        before = os.getcwd()
        with TemporaryDirectoryName(suffix="xyz") as directory:
            with set_cwd(directory):
                self.assertEqual(os.getcwd(), os.path.realpath(directory))
            self.assertTrue(directory.endswith("xyz"))
        self.assertEqual(os.getcwd(), before)
        self.assertFalse(os.path.exists(directory))

    def test_file(self):
        with TemporaryFileName(suffix=".pt") as name:
            torch.save(1, name)
            self.assertTrue(name.endswith(".pt"))
        self.assertFalse(os.path.exists(name))

    def test_leaked_tensors_are_reported(self):
        with warnings.catch_warnings(record=True) as caught, check_leaked_tensors() as leaked:
            warnings.simplefilter("always")
            cycle = [torch.ones(2)]
            cycle.append(cycle)
            del cycle
        self.assertEqual(len(leaked), 1)
        self.assertIn("1 tensors were found in the garbage", str(caught[0].message))
        self.assertEqual([gc.get_debug(), gc.garbage], [0, []])

    def test_other_cycles_are_no_leak(self):
        with warnings.catch_warnings(record=True) as caught, check_leaked_tensors() as leaked:
            warnings.simplefilter("always")
            cycle = []
            cycle.append(cycle)
            del cycle
        self.assertEqual([leaked, caught], [[], []])

    def test_warnings_are_suppressed(self):
        with self.assertWarns(UserWarning):
            suppress_warnings(warnings.warn)("boo")
            warnings.warn("told", stacklevel=1)


class TestPorts(TestCase):
    def test_the_port_can_be_bound(self):
        with socket.socket() as server:
            server.bind(("localhost", find_free_port()))

    def failing(self, times, error):
        left = [error] * times
        calls = []

        def connect(value):
            calls.append(value)
            if left:
                raise left.pop()
            return value

        return connect, calls

    def retried(self, function, *args, **options):
        with mock.patch.object(time, "sleep") as sleep:
            decorated = (
                retry_on_connect_failures(**options)(function) if options else retry_on_connect_failures(function)
            )
            try:
                return decorated(*args)
            finally:
                self.waits = sleep.call_count

    def test_tries_again(self):
        connect, calls = self.failing(3, RuntimeError("[Errno 98] Address already in use"))
        self.assertEqual(self.retried(connect, 5), 5)
        self.assertEqual([len(calls), self.waits], [4, 3])

    def test_gives_up_after_ten_tries(self):
        connect, calls = self.failing(99, RuntimeError("Address already in use"))
        with self.assertRaisesRegex(RuntimeError, "Failing after 10 retries with error: Address already in use"):
            self.retried(connect, 5)
        self.assertEqual([len(calls), self.waits], [10, 9])

    def test_other_errors_are_not_tried_again(self):
        for error in (RuntimeError("something else"), ValueError("Address already in use")):
            connect, calls = self.failing(1, error)
            with self.assertRaises(type(error)):
                self.retried(connect, 5)
            self.assertEqual(len(calls), 1)

    def test_other_texts(self):
        for errors in (common_utils.CONNECT_TIMEOUT, [common_utils.CONNECT_TIMEOUT]):
            connect, _ = self.failing(1, RuntimeError("connect() timed out. Original timeout was 1 ms."))
            self.assertEqual(self.retried(connect, 5, connect_errors=errors), 5)

    def test_a_text_is_one_text_not_its_letters(self):
        connect, calls = self.failing(1, RuntimeError("something else"))
        with self.assertRaisesRegex(RuntimeError, "^something else$"):
            self.retried(connect, 5, connect_errors=common_utils.CONNECT_TIMEOUT)
        self.assertEqual(len(calls), 1)

    def test_waiting_draws_none_of_the_tests_random_numbers(self):
        random.seed(3)
        before = random.getstate()
        ports._jitter.random()
        self.assertEqual(random.getstate(), before)


class TestSmallThings(TestCase):
    def test_noncontiguous(self):
        for tensor in (torch.rand(2, 3, requires_grad=True), torch.tensor([True, False]), torch.arange(3)):
            like = noncontiguous_like(tensor)
            self.assertFalse(like.is_contiguous())
            self.assertEqual(like, tensor)
            self.assertEqual(like.requires_grad, tensor.requires_grad)
        strided = torch.ones(2, 3).t()
        self.assertIs(noncontiguous_like(strided), strided)

    def test_clones(self):
        tensor = torch.ones(2)
        first, (second, text) = clone_input_helper([tensor, (tensor, "ab")])
        tensor.zero_()
        self.assertEqual([first, second, text], [torch.ones(2), torch.ones(2), "ab"])

    def test_lazy_value(self):
        made = mock.Mock(return_value=3)
        value = LazyVal(made)
        made.assert_not_called()
        self.assertTrue(value)
        self.assertTrue(value == 3 and value > 2 and not value < 3)
        self.assertEqual([value + 1, int(value), [0, 1, 2, 3][value], -value], [4, 3, 3, -3])
        made.assert_called_once_with()

    def test_members_are_patched_for_the_test(self):
        class Case(TestCase):
            limit = 1

            @patch_test_members({"limit": 5})
            def test_it(self):
                self.seen = self.limit
                raise KeyError

        case = Case("test_it")
        with self.assertRaises(KeyError):
            case.test_it()
        self.assertEqual([case.seen, case.limit], [5, 1])

    def test_mocked_methods_still_work(self):
        class Thing:
            @mock_wrapper
            def double(self, value):
                return 2 * value

        self.assertEqual(Thing().double(4), 8)
        Thing.double.mock.assert_called_once_with(4)

    def test_gradcheck_looks_at_batched_gradients(self):
        with mock.patch("torch.autograd.gradcheck") as check:
            gradcheck(torch.sin, (torch.ones(1),), atol=1, fast_mode=None)
        self.assertEqual(check.call_args.kwargs, {"check_batched_grad": True, "fast_mode": True, "atol": 1})

    def test_cycles(self):
        self.assertGreater(get_cycles_per_ms("cpu"), 0)

    def test_load_tests_keeps_tests_of_the_script(self):
        suite = unittest.TestSuite([unittest.defaultTestLoader.loadTestsFromTestCase(TestPorts), unittest.TestSuite()])
        with mock.patch.object(sys, "argv", [__file__]):
            self.assertEqual(len(list(load_tests_of_script(None, suite, None))), 1)

    def test_load_tests_refuses_tests_from_elsewhere(self):
        suite = unittest.TestSuite([unittest.defaultTestLoader.loadTestsFromTestCase(TestPorts)])
        with (
            mock.patch.object(sys, "argv", ["/somewhere/test_other.py"]),
            self.assertRaisesRegex(AssertionError, "twice"),
        ):
            load_tests_of_script(None, suite, None)

    def test_every_exported_name_is_there(self):
        exported: dict[str, object] = {}
        exec("from torch_testing_ext.common_utils import *", exported)
        self.assertGreater(len(exported), 70)
        for name in exported.keys() - {"__builtins__"}:
            self.assertIs(exported[name], getattr(common_utils, name))

    def test_importing_left_the_signals_alone(self):
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)


if __name__ == "__main__":
    run_tests()
