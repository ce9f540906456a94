"""MultiProcessTestCase: what the parent raises for an exception in a rank."""

import threading
import unittest

from notes import note
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

STRICTER = {
    "RankCleanupsTest.test_raises": ("a cleanup of the test method fails in a rank", "error"),
}


class OwnError(Exception):
    pass


class NotPicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")
        self.lock = threading.Lock()


class Spawning(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()


class AllRanksTest(Spawning):
    def test_value_error(self):
        raise ValueError("all ranks")

    def test_assertion(self):
        raise AssertionError("all ranks")

    def test_assert_equal(self):
        self.assertEqual(1, 2)

    def test_own_exception(self):
        raise OwnError("of the file")

    def test_not_picklable(self):
        raise NotPicklable("of", "two")

    def test_empty_message(self):
        raise RuntimeError

    def test_chained(self):
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    def test_unicode(self):
        raise ValueError("grüße → 世界")

    def test_long_message(self):
        raise ValueError("begin " + "x" * 100_000)

    def test_fail(self):
        self.fail("by self.fail")

    def test_runtime_error(self):
        raise RuntimeError("all ranks")

    def test_not_implemented(self):
        raise NotImplementedError("not here")


class OneRankTest(Spawning):
    def test_rank_0(self):
        if self.rank == 0:
            raise ValueError("rank 0 alone")

    def test_rank_1(self):
        if self.rank == 1:
            raise ValueError("rank 1 alone")


class CaughtTest(MultiProcessTestCase):
    """What code around the waiting method catches."""

    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _join_processes(self, fn):
        for kind in (RuntimeError, AssertionError):
            if self._testMethodName.endswith(kind.__name__):
                with self.assertRaises(kind) as caught:
                    super()._join_processes(fn)
                note(self, "ValueError: caught" in str(caught.exception))

    def test_error_RuntimeError(self):
        raise ValueError("caught")

    def test_assertion_RuntimeError(self):
        raise AssertionError("caught")

    def test_exit_AssertionError(self):
        raise SystemExit(3)


class ExpectedFailuresTest(Spawning):
    @unittest.expectedFailure
    def test_fails(self):
        raise AssertionError("as expected")

    @unittest.expectedFailure
    def test_raises(self):
        raise ValueError("as expected")

    @unittest.expectedFailure
    def test_passes(self):
        pass


class SubtestsTest(Spawning):
    def test_passes(self):
        for number in range(3):
            with self.subTest(number=number):
                note(self, number)

    def test_fails_in_the_rank(self):
        with self.subTest(number=1):
            self.fail("in a subtest")


class RankCleanupsTest(Spawning):
    def test_raises(self):
        self.addCleanup(self.raises)

    def raises(self):
        raise ValueError("in a cleanup")


class NamesTest(unittest.TestCase):
    def test_wrong_method(self):
        with self.assertRaises(ValueError):
            Spawning(methodName="test_missing")

    def test_no_method(self):
        self.assertEqual(Spawning()._testMethodName, "runTest")

    def test_positional(self):
        self.assertTrue(AllRanksTest("test_fail").id().endswith("AllRanksTest.test_fail"))

    def test_by_keyword(self):
        self.assertTrue(AllRanksTest(methodName="test_fail").id().endswith("AllRanksTest.test_fail"))


if __name__ == "__main__":
    run_tests()
