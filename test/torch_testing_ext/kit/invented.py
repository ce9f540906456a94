"""Invented tests and units, for tests that start no process."""

from torch_testing_ext.runner.model import Attempt, FinishedTest, Test, TestId, TestOutcome, Unit


def make_test(name, file="test/distributed/test_x.py", cls="XTest", **needs):
    return Test(TestId(file, cls, name), **needs)


def make_unit(number, devices=0, ranks=1, seconds=None, **more):
    test = make_test(f"test_{number}", devices=devices, world_size=max(devices, ranks), **more)
    return Unit(number, (test,), seconds=seconds)


def finished_test(test, outcome=TestOutcome.PASSED, seconds=1.0):
    return FinishedTest((Attempt(test, outcome, seconds=seconds),))
