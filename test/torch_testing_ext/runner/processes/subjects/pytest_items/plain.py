import logging
import os
import sys
import time

import pytest

from torch_testing_ext.common_utils import timeout


def test_passes(tmp_path, capsys, request):
    print("captured")
    assert capsys.readouterr().out == "captured\n"
    assert "own_basetemp" not in str(tmp_path)


def test_fails():
    logging.warning("logged %d", 3)
    print("printed")
    found = [1, 2]
    assert found == [1, 3]


def test_raises():
    raise LookupError("gone")


def test_sys_exit():
    sys.exit(0)


def test_exits():
    os._exit(0)


def test_pytest_exit():
    pytest.exit("enough", returncode=0)


def test_interrupts():
    raise KeyboardInterrupt


def test_pytest_fail():
    pytest.fail("by hand")


def test_swallowed():
    pass


def test_plugin_crashes():
    pass


def test_stops_the_session():
    pass


def test_fails_the_session():
    pass


def test_counts_a_failure():
    pass


def test_deselected():
    raise AssertionError("it was run")


def test_closes_all():
    os.closerange(3, 4096)


def test_warns():
    import warnings

    warnings.warn("made an error by pytest.ini")


@timeout(4)
def test_hangs():
    time.sleep(1000)


@pytest.mark.parametrize("number", [1, 2, "a b::c/d"])
def test_param(number):
    assert number != 2


@pytest.mark.skip(reason="never")
def test_skip():
    raise AssertionError("it was run")


@pytest.mark.skipif("True", reason="not if")
def test_skipif():
    raise AssertionError("it was run")


def test_skips_itself():
    pytest.skip("inside")


@pytest.mark.xfail(reason="known")
def test_xfail():
    assert 0


@pytest.mark.xfail(raises=ZeroDivisionError)
def test_xfail_otherwise():
    raise LookupError("not by zero")


@pytest.mark.xfail(strict=True, reason="known")
def test_xfail_strict():
    pass


@pytest.mark.xfail(reason="known")
def test_xpass():
    pass


@pytest.mark.xfail(run=False, reason="not even run")
def test_xfail_not_run():
    os._exit(0)


@pytest.mark.slow
class TestSlow:
    def test_method(self):
        pass

    class TestInner:
        def test_inner(self):
            assert self.__class__.__name__ == "TestInner"


@pytest.fixture
def fails_late():
    yield
    raise ValueError("in a tear-down")


@pytest.fixture
def exits_late():
    yield
    os._exit(0)


@pytest.fixture
def fails_early():
    raise ValueError("in a set-up")


@pytest.fixture
def skips():
    pytest.skip("by a fixture")


@pytest.fixture(scope="session")
def hangs_late():
    yield
    wait()


def wait():
    time.sleep(1000)


def test_fixture_fails_late(fails_late):
    pass


def test_fails_and_its_fixture(fails_late):
    assert False, "first"


def test_fixture_exits_late(exits_late):
    pass


def test_fixture_fails_early(fails_early):
    pass


def test_no_fixture(nothing_of_this_name):
    pass


def test_fixture_skips(skips):
    raise AssertionError("it was run")


@timeout(4)
def test_session_fixture_hangs_late(hangs_late):
    pass


def test_subtests(subtests):
    for number in range(3):
        with subtests.test(number=number):
            assert number != 1
