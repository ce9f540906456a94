import unittest

import pytest

from torch_testing_ext import launch


def test_passes(): ...
def test_assertion():
    assert 1 == 2


def test_exception():
    raise KeyError("key")


def test_fail():
    pytest.fail("by pytest.fail")


def test_exits():
    raise SystemExit(0)


def test_skips():
    pytest.skip("in the call")


@pytest.mark.skip(reason="by a mark")
def test_skipped(): ...
def test_unittest_skips():
    raise unittest.SkipTest("of unittest")


def test_needs():
    error = pytest.skip.Exception("too few devices")
    error.want = "2 devices"
    raise error


@pytest.mark.xfail(reason="it is known")
def test_xfails():
    assert False


@pytest.mark.xfail
def test_xfails_without_reason():
    assert False


@pytest.mark.xfail(raises=KeyError)
def test_xfails_otherwise():
    raise ValueError("other")


def test_calls_xfail():
    pytest.xfail("it gives up")


@pytest.mark.xfail(reason="it is thought")
def test_xpasses(): ...
@pytest.mark.xfail(reason="it is sure", strict=True)
def test_strict_xpass(): ...
@pytest.mark.xfail(strict=True)
def test_strict_xpass_without_reason(): ...


@pytest.fixture
def bad():
    raise AssertionError("bad")


@pytest.fixture
def worse():
    yield
    raise KeyError("worse")


@pytest.fixture
def leaves():
    yield
    pytest.skip("too late")


def test_set_up(bad): ...
def test_tear_down(worse): ...
def test_both(worse):
    assert False


@pytest.mark.xfail(reason="it is sure", strict=True)
def test_strict_xpass_and_tear_down(worse): ...
def test_tear_down_skips(leaves): ...
def test_unknown_fixture(nowhere): ...


def test_ranks():
    error = RuntimeError("rank 1 of 2 hangs")
    error.outcome = launch.TestOutcome.TIMEOUT
    raise error


class UnittestTest(unittest.TestCase):
    def test_fails(self):
        self.fail("of unittest")

    def test_skips(self):
        self.skipTest("of unittest")

    @unittest.expectedFailure
    def test_expected(self):
        self.fail("as expected")

    @unittest.expectedFailure
    def test_unexpected(self): ...
