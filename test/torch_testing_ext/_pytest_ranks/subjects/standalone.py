import os
import signal
import threading
import unittest
import warnings

import pytest

with open(os.environ["PIDS"], "a") as file:
    file.write(f"{os.getpid()}\n")

IN_PARENT = os.environ["PIDS"] and len(open(os.environ["PIDS"]).read().split()) == 1

standalone = pytest.mark.standalone


@pytest.fixture(scope="session")
def of_session():
    assert not IN_PARENT
    yield 3


@standalone
@pytest.mark.parametrize("number", [1])
def test_passes(number, of_session, tmp_path, record_property):
    assert (number, of_session) == (1, 3) and not IN_PARENT
    print("printed there")
    warnings.warn("warned there")
    record_property("key", "value")
    os.write(1, b"written there")


@standalone
class TestClass:
    def setup_method(self):
        assert not IN_PARENT

    def test_fails(self):
        value = 1
        assert value == 2

    def test_skips(self):
        pytest.skip("skipped there")

    @pytest.mark.skip(reason="skipped here")
    def test_skipped(self): ...

    @pytest.mark.xfail(raises=ValueError)
    def test_xfails_otherwise(self):
        raise TypeError

    @pytest.mark.xfail(strict=True)
    def test_xpasses(self): ...

    def test_xpasses_by_a_mark_of_its_own(self, request):
        request.applymarker(pytest.mark.xfail(strict=True))

    def test_dies(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def test_exits(self):
        os._exit(0)

    @pytest.mark.standalone(timeout=2)
    def test_hangs(self):
        threading.Event().wait()

    def test_set_up_fails(self, bad):
        raise AssertionError("it runs")

    def test_tear_down_fails(self, worse): ...

    @pytest.mark.world_size(2)
    def test_ranks_fail(self, dist_env):
        assert dist_env.rank == 0


@pytest.fixture
def bad():
    raise KeyError("bad")


@pytest.fixture
def worse():
    yield
    raise KeyError("worse")


@standalone
class UnittestTest(unittest.TestCase):
    def setUp(self):
        assert not IN_PARENT

    def test_fails(self):
        self.assertEqual(1, 2)


def test_plain():
    assert IN_PARENT
