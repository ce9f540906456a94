"""parametrize, subtest, modules of parameters: names of tests, order, values."""

import unittest

import torch
from notes import note
from torch.testing._internal.common_utils import (
    TestCase,
    decorateIf,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
)


class NamesTest(TestCase):
    @parametrize("x", [1, 2])
    def test_integers(self, x):
        note(self, x)

    @parametrize("x", [0.5, -1.5])
    def test_floats(self, x):
        note(self, x)

    @parametrize("x", ["a", "b c", "d.e"])
    def test_texts(self, x):
        note(self, x)

    @parametrize("x", [True, False, None])
    def test_constants(self, x):
        note(self, x)

    @parametrize("x", [torch.float32, torch.int64])
    def test_dtypes(self, x):
        note(self, x)

    @parametrize("x,y", [(1, 2), (3, 4)])
    def test_pairs(self, x, y):
        note(self, x, y)

    @parametrize("x", [[1], [2, 3]])
    def test_lists(self, x):
        note(self, x)

    @parametrize("x", [(1, 2), (3,)])
    def test_tuples(self, x):
        note(self, x)

    @parametrize("x", [subtest(1, name="one"), subtest(2, name="two")])
    def test_subtests(self, x):
        note(self, x)

    @parametrize("x", [1, subtest(2, decorators=[unittest.skip("the second")])])
    def test_decorated(self, x):
        note(self, x)

    @parametrize("x", [1, 2], name_fn=lambda x: f"named{x}")
    def test_name_fn(self, x):
        note(self, x)

    @parametrize("x", [1, 2])
    @parametrize("y", ["a", "b"])
    def test_product(self, x, y):
        note(self, x, y)

    @parametrize("x", [int, str])
    def test_types(self, x):
        note(self, x)

    @parametrize("x", [torch.add, torch.nn.Linear])
    def test_functions(self, x):
        note(self, x.__name__)

    @parametrize("x", range(3))
    def test_range(self, x):
        note(self, x)

    @parametrize("x", [1])
    @unittest.expectedFailure
    def test_expected_failure(self, x):
        self.fail("as expected")

    @parametrize("x", [1])
    @unittest.skip("below")
    def test_skipped(self, x):
        note(self, x)

    @decorateIf(unittest.skip("x is 1"), lambda params: params["x"] == 1)
    @parametrize("x", [1, 2])
    def test_decorate_if(self, x):
        note(self, x)

    def test_plain(self):
        note(self, "plain")


instantiate_parametrized_tests(NamesTest)


@instantiate_parametrized_tests
class ByDecoratorTest(TestCase):
    @parametrize("x", [1])
    def test_one(self, x):
        note(self, x)


class InheritsTest(ByDecoratorTest):
    pass


class ErrorsTest(TestCase):
    def test_same_names(self):
        class Twice(TestCase):
            @parametrize("x", [subtest(1, name="same"), subtest(2, name="same")])
            def test_it(self, x):
                pass

        with self.assertRaises(AssertionError):
            instantiate_parametrized_tests(Twice)

    def test_wrong_number_of_values(self):
        with self.assertRaises((RuntimeError, ValueError)):

            class Wrong(TestCase):
                @parametrize("x,y", [(1, 2, 3)])
                def test_it(self, x, y):
                    pass

            instantiate_parametrized_tests(Wrong)


if __name__ == "__main__":
    run_tests()
