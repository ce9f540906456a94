import os

import pytest


@pytest.mark.parametrize("name", ["a b::c/d[1]", "é"])
def test_param(name):
    pass


from torch_testing_ext.common_utils import timeout


def test_1(request):
    assert os.path.isdir(request.session.folder)


def test_2(request):
    assert os.path.isdir(request.session.folder)


def test_raises_at_the_end():
    pass


def test_exits_at_the_end():
    pass


def test_fails_at_the_end():
    pass


@timeout(4)
def test_hangs_at_the_end():
    pass
