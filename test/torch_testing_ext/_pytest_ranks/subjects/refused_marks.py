import os

import pytest


def size():
    return os.environ.get("WORLD_SIZE")


def test_from_hook():
    assert size() == "2"


def test_unmarked():
    assert size() is None
    test_unmarked.pid = os.getpid()


def test_alone():
    assert getattr(test_unmarked, "pid", None) is None


@pytest.mark.world_size([2, 3])
def test_other_size_from_hook(): ...


class TestSetUp:
    def test_from_set_up(self):
        assert size() == "2"


def test_list(): ...


def test_fixture(adds):
    raise SystemError("it ran")


def test_body(request):
    request.node.add_marker(pytest.mark.world_size(2))


@pytest.mark.world_size(2)
def test_body_in_ranks(request):
    request.node.add_marker(pytest.mark.world_size(2))


def of_doctest():
    ">>> pass"
