"""Large tensors whose numbers are all equal are compared without tolerances, with the same outcome."""

from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_testing_ext.common_utils import TestCase, run_tests

SIZE = 5000


class Sees(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class TestLargeTensors(TestCase):
    def assert_differ(self, ours, theirs, regex, **options):
        with self.assertRaisesRegex(AssertionError, regex):
            self.assertEqual(ours, theirs, **options)

    def test_equal_numbers_need_no_tolerance(self):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            ours = torch.randn(SIZE).to(dtype)
            with mock.patch.object(torch, "isclose", side_effect=AssertionError("compared by tolerances")):
                self.assertEqual(ours, ours.clone())

    def test_all_else_is_compared_as_always(self):
        ours = torch.randn(SIZE)
        near, far, nan = ours + 1e-9, ours.clone(), ours.clone()
        far[-1] += 1
        nan[0] = float("nan")
        self.assertEqual(ours, near)
        self.assert_differ(ours, far, "Mismatched elements: 1 / 5000")
        self.assertEqual(nan, nan.clone())
        self.assert_differ(nan, nan.clone(), "Mismatched elements: 1 / 5000", equal_nan=False)
        self.assert_differ(ours, ours.double(), "dtype")
        self.assert_differ(ours, ours[:-1], "shape")
        self.assert_differ(ours[::2], ours[::2].clone(), "strides|stride", exact_stride=True)
        self.assertNotEqual(ours, far)

    def test_signs_of_zero_and_infinities(self):
        ours = torch.zeros(SIZE)
        self.assertEqual(ours, -ours)
        self.assertEqual(ours + float("inf"), ours + float("inf"))
        self.assert_differ(ours + float("inf"), ours - float("inf"), "Mismatched elements: 5000 / 5000")

    def test_wrong_tolerances_stay_errors(self):
        for size in (SIZE, 3):
            ours, theirs = torch.ones(size), torch.ones(size)
            with self.assertRaises(Exception) as caught:
                torch.testing.assert_close(ours, theirs, rtol=float("nan"), atol=0)
            with self.assertRaises(type(caught.exception)):
                self.assertEqual(ours, theirs, rtol=float("nan"), atol=0)

    def test_a_mode_sees_the_same(self):
        ours, seen = torch.ones(SIZE), []
        for size in (SIZE, 3):
            with Sees() as mode:
                self.assertEqual(ours[:size], ours[:size].clone())
            seen.append(mode.seen)
        self.assertEqual(*seen)


if __name__ == "__main__":
    run_tests()
