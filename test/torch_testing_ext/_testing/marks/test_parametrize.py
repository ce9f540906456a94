"""parametrize and related decorators: names and outcomes as in PyTorch, and errors."""

import inspect
import json
import unittest
from pathlib import Path

from kit.processes import output_of_python

from torch_testing_ext.common_utils import (
    TestCase,
    _TestParametrizer,
    decorateIf,
    instantiate_parametrized_tests,
    parametrize,
    reparametrize,
    run_tests,
    subtest,
)

CASES = Path(__file__).with_name("parametrize_cases.py")


def describe_with(kit):
    return json.loads(output_of_python(CASES, kit))


def names(cls):
    return unittest.defaultTestLoader.getTestCaseNames(cls)


class TestAgainstPyTorch(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.ours = describe_with("torch_testing_ext.common_utils")
        cls.theirs = describe_with("torch.testing._internal.common_utils")

    def test_same_classes(self):
        self.assertEqual(list(self.ours), list(self.theirs))
        self.assertGreater(sum(len(tests) for tests in self.theirs.values() if isinstance(tests, dict)), 90)

    def test_same_names(self):
        for name, tests in self.theirs.items():
            with self.subTest(name):
                self.assertEqual(list(self.ours[name]), list(tests))

    def test_same_outcomes_docs_and_lines(self):
        self.assertEqual(self.ours, self.theirs)

    def test_the_reference_is_as_we_think(self):
        self.assertEqual(self.theirs["EmptyList"], "ValueError")
        self.assertEqual(self.theirs["SameParameterTwice"], "RuntimeError")
        self.assertIn("test_stacked_x_1_5_float32_z0", self.theirs["Plain"])
        self.assertEqual(self.theirs["Subtests"]["test_skip_one_x_1"]["skipped"], ["no"])


class TestInstantiation(TestCase):
    def test_values_reach_the_test(self):
        seen = []

        @instantiate_parametrized_tests
        class Case(TestCase):
            @parametrize("x", [1, 2])
            @parametrize("y,z", [("a", None), subtest(("b", 3), name="last")])
            def test_it(self, x, y, z):
                seen.append((self._testMethodName, x, y, z))

        unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(unittest.TestResult())
        self.assertEqual(
            sorted(seen, key=str),
            [
                ("test_it_x_1_last", 1, "b", 3),
                ("test_it_x_1_y_a_z0", 1, "a", None),
                ("test_it_x_2_last", 2, "b", 3),
                ("test_it_x_2_y_a_z0", 2, "a", None),
            ],
        )

    def test_metadata(self):
        @instantiate_parametrized_tests
        class Case(TestCase):
            @parametrize("x", [1])
            def test_it(self, x):
                """Looks at x."""

        method = Case.test_it_x_1
        self.assertEqual(method.__doc__, "Looks at x.")
        self.assertEqual(method.__name__, "test_it_x_1")
        self.assertTrue(method.__qualname__.endswith("Case.test_it_x_1"), method.__qualname__)
        self.assertEqual(method.__module__, __name__)
        self.assertEqual(inspect.unwrap(method).__name__, "test_it")
        self.assertIn("Looks at x.", inspect.getsource(method))
        self.assertFalse(hasattr(method, "parametrize_fn"))
        self.assertFalse(hasattr(Case, "test_it"))

    def test_twice_is_once(self):
        class Case(TestCase):
            @parametrize("x", [1, 2])
            def test_it(self, x):
                pass

        instantiate_parametrized_tests(instantiate_parametrized_tests(Case))
        self.assertEqual(names(Case), ["test_it_x_1", "test_it_x_2"])

    def test_a_subclass_may_be_instantiated_again(self):
        @instantiate_parametrized_tests
        class Base(TestCase):
            @parametrize("x", [1])
            def test_base(self, x):
                pass

        @instantiate_parametrized_tests
        class Derived(Base):
            @parametrize("x", [1])
            def test_derived(self, x):
                pass

        self.assertEqual(names(Base), ["test_base_x_1"])
        self.assertEqual(names(Derived), ["test_base_x_1", "test_derived_x_1"])

    def test_generic_tests_of_a_mixin_serve_several_classes(self):
        class Mixin:
            @parametrize("x", [1, 2])
            def test_it(self, x):
                self.seen = (self.name, x)

        @instantiate_parametrized_tests
        class First(Mixin, TestCase):
            name = "first"

        @instantiate_parametrized_tests
        class Second(Mixin, TestCase):
            name = "second"

        self.assertEqual(names(First), ["test_it_x_1", "test_it_x_2"])
        self.assertEqual(names(Second), ["test_it_x_1", "test_it_x_2"])
        case = Second("test_it_x_2")
        case.debug()
        self.assertEqual(case.seen, ("second", 2))
        self.assertTrue(hasattr(Mixin.test_it, "parametrize_fn"))

    def test_decorators_of_one_case_leave_the_others_alone(self):
        @instantiate_parametrized_tests
        class Case(TestCase):
            @decorateIf(unittest.expectedFailure, lambda arguments: arguments["x"] == 1)
            @parametrize("x", [1, 2])
            def test_it(self, x):
                if x == 1:
                    raise ValueError("as expected")

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
        self.assertTrue(result.wasSuccessful(), result)
        self.assertEqual(len(result.expectedFailures), 1)

    def test_decorators_see_the_arguments(self):
        seen = []

        def spy(test):
            def wrapper(self, *args, **kwargs):
                seen.append(kwargs)
                return test(self, *args, **kwargs)

            return wrapper

        class Case(TestCase):
            @parametrize("x", [subtest(1, decorators=[spy])])
            @parametrize("y", [2])
            def test_it(self, x, y):
                pass

        # `spy` does not copy the name, so the test keeps the generic one.
        instantiate_parametrized_tests(Case)
        Case("test_it_x_1_y_2").debug()
        self.assertEqual(seen, [{"x": 1, "y": 2}])

    def test_a_parametrizer_of_ones_own(self):
        class both_ways(_TestParametrizer):
            def _parametrize_test(self, test, generic_cls, device_cls):
                for way in ("forth", "back"):
                    yield test, way, {"way": way}, lambda _: []

        @instantiate_parametrized_tests
        class Case(TestCase):
            @both_ways()
            @parametrize("x", [1])
            def test_it(self, x, way):
                pass

        self.assertEqual(names(Case), ["test_it_back_x_1", "test_it_forth_x_1"])

    def test_traceback_shows_the_test_alone(self):
        @instantiate_parametrized_tests
        class Case(TestCase):
            @parametrize("x", [1])
            def test_it(self, x):
                raise ValueError(x)

        result = unittest.TestResult()
        Case("test_it_x_1").run(result)
        [(_, traceback)] = result.errors
        self.assertIn("in test_it", traceback)
        self.assertNotIn("instantiated_test", traceback)


class TestRefusals(TestCase):
    def refused(self, error, text, *decorators):
        def test_it(self, **kwargs):
            pass

        for decorator in decorators:
            test_it = decorator(test_it)
        with self.assertRaisesRegex(error, text):
            instantiate_parametrized_tests(type("Case", (TestCase,), {"test_it": test_it}))

    def test_empty_list(self):
        self.refused(ValueError, "test_it: an empty arg_values", parametrize("x", []))

    def test_used_up_generator(self):
        values = iter([1])
        list(values)
        self.refused(ValueError, "pass a list", parametrize("x", values))

    def test_same_parameter_twice(self):
        self.refused(
            RuntimeError,
            "more than one decorator parametrizes over the same parameter: x",
            parametrize("x", [1]),
            parametrize("y,x", [(1, 2)]),
        )

    def test_wrong_number_of_values(self):
        self.refused(RuntimeError, r"3 values .* for the 2 parameters x, y", parametrize("x,y", [(1, 2, 3)]))

    def test_same_name_twice(self):
        same = parametrize("x", [1, 2], lambda x: "same")
        self.refused(AssertionError, "two tests have the name test_it_same", same)
        self.refused(AssertionError, "two tests have the name test_it_x_1", parametrize("x", [1, 1]))

    def test_period_in_a_name(self):
        self.refused(RuntimeError, "cannot contain a period", parametrize("x", [1], name_fn=lambda x: "a.b"))
        self.refused(RuntimeError, "cannot contain a period", parametrize("x", [subtest(1, name="1.5")]))

    def test_everything_adapted_away_is_no_error(self):
        @instantiate_parametrized_tests
        class Case(TestCase):
            @reparametrize(parametrize("x", [1]), lambda name, arguments: None)
            def test_it(self, x):
                pass

        self.assertEqual(names(Case), [])


if __name__ == "__main__":
    run_tests()
