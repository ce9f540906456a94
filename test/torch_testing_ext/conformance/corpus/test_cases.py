"""TestCase of common_utils: assertions, hooks and attributes, in one process."""

import logging
import random
import unittest
import warnings

import numpy as np
import torch
from notes import note
from torch.testing._internal.common_utils import TestCase, run_tests


class EqualTest(TestCase):
    """Each test compares by assertEqual; what differs fails with an AssertionError."""

    def differ(self, *args, **kwargs):
        with self.assertRaises(AssertionError):
            self.assertEqual(*args, **kwargs)

    def test_numbers(self):
        self.assertEqual(1, 1)
        self.assertEqual(1, 1.0)
        self.differ(1, 2)

    def test_close_numbers(self):
        self.assertEqual(1.0, 1.0 + 1e-9)
        self.differ(1.0, 1.001)

    def test_tolerances(self):
        self.assertEqual(1.0, 1.1, atol=0.2, rtol=0)
        self.differ(1.0, 1.1, atol=0.05, rtol=0)

    def test_one_tolerance_alone(self):
        with self.assertRaises((AssertionError, ValueError)):
            self.assertEqual(torch.tensor(1.0), torch.tensor(1.5), atol=0.1)

    def test_tensors(self):
        self.assertEqual(torch.ones(2), torch.ones(2))
        self.differ(torch.ones(2), torch.zeros(2))

    def test_shapes(self):
        self.differ(torch.ones(2), torch.ones(2, 1))

    def test_dtypes(self):
        self.differ(torch.ones(2), torch.ones(2, dtype=torch.float64))
        self.assertEqual(torch.ones(2), torch.ones(2, dtype=torch.float64), exact_dtype=False)

    def test_tensor_and_number(self):
        self.assertEqual(torch.tensor(3), 3)
        self.assertEqual(torch.tensor([3.0]), 3.0)

    def test_tensor_and_list(self):
        self.assertEqual(torch.tensor([1, 2]), [1, 2])

    def test_tensor_and_array(self):
        self.assertEqual(torch.tensor([1.0, 2.0]), np.array([1.0, 2.0], dtype=np.float32))

    def test_arrays(self):
        self.assertEqual(np.ones(2), np.ones(2))
        self.differ(np.ones(2), np.zeros(2))

    def test_nan(self):
        self.assertEqual(torch.tensor(float("nan")), torch.tensor(float("nan")))
        self.differ(torch.tensor(float("nan")), torch.tensor(float("nan")), equal_nan=False)

    def test_lists(self):
        self.assertEqual([torch.ones(1), 2], [torch.ones(1), 2])
        self.differ([1, 2], [1, 2, 3])

    def test_list_and_tuple(self):
        self.assertEqual([1, 2], (1, 2))

    def test_mappings(self):
        self.assertEqual({"a": torch.ones(1)}, {"a": torch.ones(1)})
        self.differ({"a": 1}, {"b": 1})
        self.differ({"a": 1}, {"a": 2})

    def test_nested(self):
        self.assertEqual({"a": [torch.ones(1), {"b": 2}]}, {"a": [torch.ones(1), {"b": 2}]})

    def test_sets(self):
        self.assertEqual({1, 2}, {2, 1})
        self.differ({1}, {2})

    def test_text(self):
        self.assertEqual("a", "a")
        self.differ("a", "b")

    def test_none(self):
        self.assertEqual(None, None)
        self.differ(None, 0)

    def test_booleans(self):
        self.assertEqual(True, True)
        self.differ(True, False)
        self.assertEqual(torch.tensor(True), True)

    def test_types_and_dtypes_as_values(self):
        self.assertEqual(torch.float32, torch.float32)
        self.assertEqual(int, int)
        self.differ(torch.float32, torch.float64)

    def test_devices(self):
        self.assertEqual(torch.device("cpu"), torch.device("cpu"))
        self.assertEqual(torch.ones(1), torch.ones(1), exact_device=True)

    def test_strides(self):
        one = torch.ones(2, 3)
        self.assertEqual(one, one.t().contiguous().t())
        self.differ(one, one.t().contiguous().t(), exact_stride=True)

    def test_sparse(self):
        self.assertEqual(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())

    def test_layouts(self):
        self.differ(torch.eye(2).to_sparse(), torch.eye(2), exact_layout=True)

    def test_complex(self):
        self.assertEqual(torch.tensor(1 + 2j), 1 + 2j)
        self.differ(1 + 2j, 1 + 3j)

    def test_empty(self):
        self.assertEqual(torch.empty(0), torch.empty(0))
        self.assertEqual([], [])
        self.differ(torch.empty(0), torch.empty(0, 1))

    def test_quantized_free_bfloat16(self):
        self.assertEqual(torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.004, dtype=torch.bfloat16))

    def test_half(self):
        self.assertEqual(torch.tensor(1.0, dtype=torch.half), torch.tensor(1.0005, dtype=torch.half))

    def test_subclass_of_dict(self):
        from collections import OrderedDict

        self.assertEqual(OrderedDict(a=1), {"a": 1})

    def test_parameter(self):
        self.assertEqual(torch.nn.Parameter(torch.ones(1)), torch.ones(1))

    def test_requires_grad(self):
        self.assertEqual(torch.ones(1, requires_grad=True), torch.ones(1))

    def test_message(self):
        with self.assertRaisesRegex(AssertionError, "own words"):
            self.assertEqual(1, 2, "own words")

    def test_message_by_function(self):
        with self.assertRaisesRegex(AssertionError, "^made of"):
            self.assertEqual(torch.ones(1), torch.zeros(1), msg=lambda text: f"made of {len(text)}")

    def test_message_of_tensors(self):
        with self.assertRaisesRegex(AssertionError, "Tensor-likes are not close"):
            self.assertEqual(torch.ones(3), torch.zeros(3))

    def test_message_of_numbers(self):
        with self.assertRaisesRegex(AssertionError, "Scalars are not"):
            self.assertEqual(1, 2)

    def test_not_equal(self):
        self.assertNotEqual(1, 2)
        with self.assertRaises(AssertionError):
            self.assertNotEqual(torch.ones(1), torch.ones(1))

    def test_equal_ignoring_type(self):
        self.assertEqualIgnoreType(torch.ones(1), torch.ones(1, dtype=torch.int64))

    def test_broadcasting(self):
        self.assertEqualBroadcasting(torch.ones(2, 2), 1.0)

    def test_object_in(self):
        one = object()
        self.assertObjectIn(one, [one])
        with self.assertRaises(AssertionError):
            self.assertObjectIn([], [[]])

    def test_greater_almost(self):
        self.assertGreaterAlmostEqual(1.0, 1.0 + 1e-9)
        with self.assertRaises(AssertionError):
            self.assertGreaterAlmostEqual(1, 2)

    def test_iterators_of_different_types(self):
        self.assertEqual(range(3), range(3))

    def test_generators_of_numpy(self):
        self.assertEqual(np.float64(1.5), 1.5)
        self.assertEqual(np.int64(3), 3)

    def test_infinity(self):
        self.assertEqual(float("inf"), float("inf"))
        self.differ(torch.tensor(float("inf")), torch.tensor(float("-inf")))

    def test_incomparable(self):
        self.differ(torch.ones(1), "text")

    def test_unequal_modules(self):
        self.differ(object(), object())


class PrecisionTest(TestCase):
    precision = 0.5

    def test_class_tolerance(self):
        self.assertEqual(1.0, 1.4)
        with self.assertRaises(AssertionError):
            self.assertEqual(1.0, 1.6)

    def test_set_in_the_test(self):
        self.precision = 2
        self.assertEqual(1.0, 2.9)

    def test_not_in_the_next(self):
        note(self, self.precision, self.rel_tol)


class DefaultsTest(TestCase):
    def test_precision(self):
        note(self, self.precision, self.rel_tol)

    def test_max_diff(self):
        note(self, self.maxDiff)

    def test_long_message(self):
        note(self, self.longMessage)

    def test_id(self):
        note(self, self.id().rpartition(".")[2], str(self).split(" ")[0])

    def test_seed(self):
        note(self, torch.initial_seed(), torch.rand(1).item(), random.random(), float(np.random.rand()))

    def test_seed_again(self):
        note(self, torch.initial_seed(), torch.rand(1).item(), random.random(), float(np.random.rand()))

    def test_sparse_invariants(self):
        note(self, torch.sparse.check_sparse_tensor_invariants.is_enabled())

    def test_has_no_rank(self):
        note(self, hasattr(self, "rank"), hasattr(self, "world_size"))

    def test_grad_is_restored_1(self):
        torch.set_grad_enabled(False)

    def test_grad_is_restored_2(self):
        note(self, torch.is_grad_enabled())


class HooksTest(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        note(cls, "setUpClass")

    def setUp(self):
        note(self, "before setUp")
        super().setUp()
        self.addCleanup(note, self, "cleanup")

    def tearDown(self):
        note(self, "tearDown")
        super().tearDown()

    def test_passes(self):
        note(self, "body")

    def test_fails(self):
        self.fail("on purpose")

    def test_raises(self):
        raise ValueError("on purpose")

    def test_skips(self):
        self.skipTest("on purpose")

    @unittest.expectedFailure
    def test_expected(self):
        self.fail("on purpose")

    def test_subtests(self):
        for number in range(3):
            with self.subTest(number=number):
                if number == 1:
                    self.fail("the second")

    def test_subtest_skips(self):
        with self.subTest("a"):
            self.skipTest("the subtest")


class LogsTest(TestCase):
    def test_logs(self):
        with self.assertLogs("conformance", logging.INFO) as caught:
            logging.getLogger("conformance").warning("text")
        note(self, caught.output)

    def test_no_logs(self):
        with self.assertNoLogs("conformance"):
            pass

    def test_default_logger(self):
        with self.assertLogs(level="WARNING") as caught:
            logging.getLogger("torch").warning("of torch")
        note(self, caught.output)


class WarningsTest(TestCase):
    def test_not_warn(self):
        self.assertNotWarn(lambda: None)
        with self.assertRaises(AssertionError):
            self.assertNotWarn(lambda: warnings.warn("text", stacklevel=1))

    def test_warns_once(self):
        with self.assertWarnsOnceRegex(UserWarning, "te"):
            warnings.warn("text", UserWarning, stacklevel=1)

    def test_warns_regex(self):
        with self.assertWarnsRegex(UserWarning, "te"):
            warnings.warn("text", UserWarning, stacklevel=1)


class ExpectTest(TestCase):
    def test_inline(self):
        self.assertExpectedInline(str(torch.ones(1)), """tensor([1.])""")

    def test_inline_differs(self):
        self.assertExpectedInline("one", """another""")

    def test_raises_inline(self):
        def raises():
            raise ValueError("text")

        self.assertExpectedRaisesInline(ValueError, raises, """text""")


class RaisesTest(TestCase):
    def test_raises(self):
        with self.assertRaises(ValueError):
            raise ValueError

    def test_raises_regex(self):
        with self.assertRaisesRegex(ValueError, "te.t"):
            raise ValueError("text")

    def test_raises_regex_differs(self):
        with self.assertRaisesRegex(ValueError, "other"):
            raise ValueError("text")

    def test_raises_another(self):
        with self.assertRaises(ValueError):
            raise TypeError("another")

    def test_raises_nothing(self):
        with self.assertRaises(ValueError):
            pass

    def test_cpp_error(self):
        with self.assertRaisesRegex(RuntimeError, "size"):
            torch.ones(2) + torch.ones(3)


if __name__ == "__main__":
    run_tests()
