"""Test classes to be instantiated by two implementations; `classes(kit)` makes a fresh set with the kit's decorators.

Run as a script, this instantiates them with the kit named on the command line and prints, as JSON, what became of them.
"""

import enum
import importlib
import inspect
import json
import sys
import unittest

import torch


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 7


class Thing:
    pass


def function():
    pass


class Size(int):
    pass


VALUES = [
    *(0, 1, -1, 10**20, True, False, None, Level.LOW, Colour.RED, Size(3)),
    *(1.5, -0.25, 1e-8, 1e20, float("inf"), float("nan"), 2 + 1j),
    *("a", "", "a b", "x_y", "ünï", b"bytes"),
    *(torch.float32, torch.int64, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.device("cpu"), torch.device("cuda", 1), torch.device("meta"), torch.strided),
    *(Thing, Thing(), function, len, torch.nn.ReLU, torch.nn.ReLU(), lambda: 0),
    *((1, 2), [1, 2], {"a": 1}, {1}, torch.Size([2]), torch.ones(1), range(3)),
]


def classes(kit):
    parametrize, subtest = kit.parametrize, kit.subtest
    reparametrize, decorate_if = kit.reparametrize, kit.decorateIf
    made = {}

    def case(cls):
        made[cls.__name__] = cls
        return cls

    @case
    class Plain(unittest.TestCase):
        def test_alone(self):
            """Left as it is."""

        @parametrize("x", VALUES[:-1])
        def test_values(self, x):
            """Has a doc."""

        @parametrize("x", [1.5, None, "a"])
        @parametrize("y", [torch.float32, True])
        @parametrize("z", [Thing, 3])
        def test_stacked(self, x, y, z):
            pass

        @parametrize("a,b", [(1, 2), (1.5, "x"), (None, [1])])
        def test_two(self, a, b):
            pass

        @parametrize(" a , b,", [(1, 2), [3, 4]])
        def test_spaces(self, a, b):
            pass

        @parametrize("", [])
        def test_no_names(self):
            pass

        @parametrize("x", (value for value in (1, 2)))
        def test_generator(self, x):
            pass

        @parametrize("x", [(1, 2), (3, 4)])
        def test_tuples_as_one_value(self, x):
            pass

        @parametrize("x,y", [(1, 2), (3, 4)], name_fn=lambda x, y: f"{x}and{y}")
        def test_name_fn(self, x, y):
            pass

        @parametrize("x", [1, 2], name_fn=lambda x: "" if x == 1 else "b")
        def test_empty_name(self, x):
            pass

    @case
    class Subtests(unittest.TestCase):
        @parametrize("x", [subtest(1), subtest(2, name="two"), subtest([1, 2]), subtest(None, name="")])
        def test_names(self, x):
            pass

        @parametrize("x,y", [subtest((1, 2), name="first"), subtest((3, 4)), (5, 6)], name_fn=lambda x, y: f"{x}{y}")
        def test_names_and_name_fn(self, x, y):
            pass

        @parametrize("x", [subtest(1, decorators=[unittest.skip("no")]), subtest(2), 3])
        def test_skip_one(self, x):
            if x == 1:
                raise ValueError("must not run")

        @parametrize("x", [subtest(1, decorators=[unittest.expectedFailure]), subtest(2), 3])
        @parametrize("y", [True, subtest(False, decorators=[unittest.expectedFailure])])
        def test_expect_one_to_fail(self, x, y):
            if x == 1 or not y:
                raise ValueError("as expected")

        @unittest.skip("all")
        @parametrize("x", [1, 2])
        def test_skip_all_above(self, x):
            pass

        @parametrize("x", [1, 2])
        @unittest.skip("all")
        def test_skip_all_below(self, x):
            pass

        @unittest.expectedFailure
        @parametrize("x", [1, 2])
        def test_expect_all_to_fail(self, x):
            raise ValueError("as expected")

    def add_parity(name, arguments):
        even = arguments["x"] % 2 == 0
        yield f"{name}_{'even' if even else 'odd'}", {**arguments, "even": even}

    def only_even(name, arguments):
        yield (name, arguments) if arguments["x"] % 2 == 0 else None

    def nothing_for_one(name, arguments):
        return None if arguments["x"] == 1 else [(name + "_a", arguments), (name + "_b", arguments)]

    @case
    class Adapted(unittest.TestCase):
        @reparametrize(parametrize("x", range(3)), add_parity)
        def test_more(self, x, even):
            pass

        @parametrize("y", [1, 2])
        @reparametrize(parametrize("x", range(3)), only_even)
        def test_fewer(self, x, y):
            pass

        @reparametrize(parametrize("x", range(3)), nothing_for_one)
        def test_many(self, x):
            pass

        @decorate_if(unittest.skip("two"), lambda arguments: arguments["x"] == 2)
        @parametrize("x", range(4))
        def test_decorated_above(self, x):
            pass

        @parametrize("x,y", [(1, "a"), (2, "b")])
        @decorate_if(unittest.expectedFailure, lambda arguments: arguments["y"] == "b")
        def test_decorated_below(self, x, y):
            if y == "b":
                raise ValueError("as expected")

        @decorate_if(unittest.expectedFailure, lambda arguments: arguments["x"] == 1)
        @decorate_if(unittest.skip("zero"), lambda arguments: arguments["x"] == 0)
        @parametrize("x", range(3))
        def test_decorated_twice(self, x):
            if x == 1:
                raise ValueError("as expected")

    @case
    class EmptyList(unittest.TestCase):
        @parametrize("x", [])
        def test_x(self, x):
            pass

    @case
    class SameParameterTwice(unittest.TestCase):
        @parametrize("x", [1])
        @parametrize("x", [2])
        def test_x(self, x):
            pass

    @case
    class WrongNumberOfValues(unittest.TestCase):
        @parametrize("x,y", [(1, 2, 3)])
        def test_x(self, x, y):
            pass

    return made


def describe(cls, kit):
    """Describe the instantiated class: each test, its outcome, and its source line."""
    try:
        instantiated = kit.instantiate_parametrized_tests(cls)
        assert instantiated is cls
    except Exception as error:
        return type(error).__name__
    return {name: describe_test(cls, name) for name in unittest.defaultTestLoader.getTestCaseNames(cls)}


def describe_test(cls, name):
    result = unittest.TestResult()
    cls(name).run(result)
    method = getattr(cls, name)
    ending = {
        "failures": len(result.failures),
        "errors": len(result.errors),
        "skipped": [reason for _, reason in result.skipped],
        "expected": len(result.expectedFailures),
        "unexpected": len(result.unexpectedSuccesses),
    }
    return {**ending, "doc": method.__doc__, "line": inspect.getsourcelines(inspect.unwrap(method))[1]}


def main():
    kit = importlib.import_module(sys.argv[1])
    json.dump({name: describe(cls, kit) for name, cls in classes(kit).items()}, sys.stdout)


if __name__ == "__main__":
    main()
