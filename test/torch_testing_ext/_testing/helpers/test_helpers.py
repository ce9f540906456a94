"""Context managers and small helpers of common_utils."""

import gc
import os
import sys
import unittest
import warnings
from unittest import mock

import pytest
import torch
from kit.processes import output_of_python

from torch_testing_ext import common_utils
from torch_testing_ext.common_utils import (
    DeterministicGuard,
    LazyVal,
    TemporaryDirectoryName,
    TemporaryFileName,
    TestCase,
    check_leaked_tensors,
    disable_gc,
    freeze_rng_state,
    get_cycles_per_ms,
    gradcheck,
    load_tests as load_tests_of_script,
    mock_wrapper,
    run_tests,
    set_cwd,
    set_default_dtype,
    set_rng_seed,
    suppress_warnings,
)


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

    def test_cycles_without_tensors_are_no_leak(self):
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


class TestSmallHelpers(TestCase):
    def test_lazy_value(self):
        made = mock.Mock(return_value=3)
        value = LazyVal(made)
        made.assert_not_called()
        self.assertTrue(value)
        self.assertTrue(value == 3 and value > 2 and not value < 3)
        self.assertEqual([value + 1, int(value), [0, 1, 2, 3][value], -value], [4, 3, 3, -3])
        made.assert_called_once_with()

    def test_mocked_methods_still_work(self):
        class Thing:
            @mock_wrapper
            def double(self, value):
                return 2 * value

        self.assertEqual(Thing().double(4), 8)
        Thing.double.mock.assert_called_once_with(4)

    def test_gradcheck_checks_batched_gradients(self):
        with mock.patch("torch.autograd.gradcheck") as check:
            gradcheck(torch.sin, (torch.ones(1),), atol=1, fast_mode=None)
        self.assertEqual(check.call_args.kwargs, {"check_batched_grad": True, "fast_mode": True, "atol": 1})

    def test_cycles(self):
        self.assertGreater(get_cycles_per_ms("cpu"), 0)

    def test_load_tests_keeps_tests_of_the_script(self):
        suite = unittest.TestSuite(
            [unittest.defaultTestLoader.loadTestsFromTestCase(TestContexts), unittest.TestSuite()]
        )
        with mock.patch.object(sys, "argv", [__file__]):
            self.assertEqual(len(list(load_tests_of_script(None, suite, None))), 1)

    def test_load_tests_refuses_tests_from_elsewhere(self):
        suite = unittest.TestSuite([unittest.defaultTestLoader.loadTestsFromTestCase(TestContexts)])
        with (
            mock.patch.object(sys, "argv", ["/somewhere/test_other.py"]),
            self.assertRaisesRegex(AssertionError, "twice"),
        ):
            load_tests_of_script(None, suite, None)

    def test_every_exported_name_exists(self):
        exported: dict[str, object] = {}
        exec("from torch_testing_ext.common_utils import *", exported)
        self.assertGreater(len(exported), 70)
        for name in exported.keys() - {"__builtins__"}:
            self.assertIs(exported[name], getattr(common_utils, name))

    @pytest.mark.slow
    def test_importing_changes_no_signal_handler(self):
        """In a new interpreter, however this one was started."""
        source = """if True:
            import signal, sys
            signal.signal(signal.SIGINT, signal.default_int_handler)
            numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
            before = {number: signal.getsignal(number) for number in numbers}
            import torch_testing_ext.common_utils
            changed = [number for number in numbers if signal.getsignal(number) != before[number]]
            sys.exit(f"changed: {changed}" if changed else 0)
        """
        output_of_python("-c", source)


if __name__ == "__main__":
    run_tests()
