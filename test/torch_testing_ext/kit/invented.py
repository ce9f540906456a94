"""Invented tests and units, for tests that start no process."""

from dataclasses import fields

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import Attempt, FinishedTest, Test, TestEnd, TestId, Unit


def make_test(name, file="test/distributed/test_x.py", cls="XTest", **needs):
    return Test(TestId(file, cls, name), **needs)


def make_unit(number, devices=0, ranks=1, seconds=None, **more):
    test = make_test(f"test_{number}", devices=devices, world_size=max(devices, ranks), **more)
    return Unit(number, (test,), seconds=seconds)


def make_attempt(test, outcome=TestOutcome.PASSED, message="", seconds=0.0, **more):
    """An attempt with facts of its own and of its end, by their names there."""
    of_end = {name: more.pop(name) for name in {field.name for field in fields(TestEnd)} & more.keys()}
    return Attempt(test, TestEnd(outcome, message, **of_end), seconds, **more)


def finished_test(test, outcome=TestOutcome.PASSED, seconds=1.0):
    return FinishedTest((make_attempt(test, outcome, seconds=seconds),))
