import functools  # noqa: F401 (for `import *`)


def test_helper():
    pass


class TestHelper:
    def test_it(self):
        pass


def bare_decorator(function):
    def wrapper():
        return function()

    return wrapper


def nonsense(function):
    return 3


class Case:
    def test_from_base(self):
        pass
