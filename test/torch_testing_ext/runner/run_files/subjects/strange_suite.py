"""Tests that skip, fail and are made in every way that pytest and unittest have."""

import sys
import unittest

import pytest


class SubTest(unittest.TestCase):
    def test_sub(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertLess(i, 2)

    def test_skips_one_subtest(self):
        for i in range(3):
            with self.subTest(i=i):
                if i == 1:
                    self.skipTest("one only")


@unittest.skip("whole class")
class SkippedClass(unittest.TestCase):
    def test_a(self):
        pass

    def test_b(self):
        pass


@pytest.mark.skipif(sys.version_info > (3,), reason="class mark")
class TestMarked:
    def test_c(self):
        pass


class TestSetupSkips(unittest.TestCase):
    def setUp(self):
        self.skipTest("requires 4 GPUs")

    def test_in_setup(self):
        pass


class TestSetupClass(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("no NCCL")

    def test_in_setup_class(self):
        pass


@pytest.fixture
def gpu():
    pytest.skip("requires a GPU")


def test_fixture(gpu):
    pass


@pytest.mark.parametrize(
    "x",
    [1, pytest.param(2, marks=pytest.mark.skip(reason="broken")), pytest.param(3, marks=pytest.mark.xfail(run=False))],
)
def test_param(x):
    pass


@pytest.mark.parametrize("x,y", [(1, 2), (3, 4)])
@pytest.mark.parametrize("z", ["a b", "c[d]"])
def test_two(x, y, z):
    pass


@pytest.mark.parametrize("x", [])
def test_empty(x):
    pass


def make(n):
    def test_it(self):
        self.assertTrue(n)

    return test_it


class Generated(unittest.TestCase):
    pass


for n in (1, 2):
    setattr(Generated, f"test_gen_{n}", make(n))


@pytest.mark.xfail
def test_xfails():
    assert 0


@pytest.mark.xfail
def test_xpasses():
    pass


@pytest.mark.xfail(strict=True)
def test_xpass_strict():
    pass


requires_gpu = pytest.mark.skipif(True, reason="test requires a GPU")


@requires_gpu
def test_named_mark():
    pass


async def test_async():
    pass


def test_error(nofixture):
    pass


class TestOuter:
    class TestInner:
        def test_nested(self):
            pass


class Base:
    def test_mixin(self):
        pass


class TestFromMixin(Base, unittest.TestCase):
    pass


class TestFromBase(Base):
    pass


@pytest.mark.slow
def test_slow():
    pass
