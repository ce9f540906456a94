"""Every outcome of a test with one process that ends by itself."""

import os
import unittest

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize


class SimpleTest(unittest.TestCase):
    def test_passes(self):
        self.assertEqual(1 + 1, 2)

    def test_fails(self):
        print("what it printed before")
        self.assertEqual("left", "right")

    def test_raises(self):
        raise LookupError("nothing is <there> & \x00 never was")

    @unittest.skip("skipped before it runs")
    def test_skipped_by_decorator(self):
        self.fail("a skipped test was run")

    def test_skips_itself(self):
        self.skipTest("skipped while it runs")

    @unittest.expectedFailure
    def test_expected_failure(self):
        self.assertEqual("left", "right")

    @unittest.expectedFailure
    def test_unexpected_success(self):
        pass

    def test_subtests(self):
        for number in range(4):
            with self.subTest(number=number):
                self.assertNotIn(number, (1, 3))

    def test_good_subtests(self):
        for number in range(4):
            with self.subTest(number=number):
                self.assertLess(number, 4)

    def test_exits_by_sys_exit(self):
        raise SystemExit(3)

    def test_prints_20_megabytes(self):
        line = b"x" * 79 + b"\n"
        for _ in range(260_000):
            os.write(1, line)
        print("the last line of it")

    def test_changes_what_others_have(self):
        os.chdir("/")
        os.environ["PROJECT_WAS_CHANGED"] = "1"

    def test_has_what_it_should(self):
        self.assertNotIn("PROJECT_WAS_CHANGED", os.environ)
        self.assertNotEqual(os.getcwd(), "/")


class ParametrizedTest(unittest.TestCase):
    @parametrize("size", [1, 2])
    @parametrize("kind", ["even", "odd"])
    def test_sizes(self, size, kind):
        self.assertEqual(size % 2 == 0, kind == "even")


instantiate_parametrized_tests(ParametrizedTest)
