import os

import pytest

seen = []


@pytest.mark.world_size(2, scope="module")
def test_1():
    seen.append(os.getpid())


@pytest.mark.world_size(2)
def test_alone():
    assert seen == []


@pytest.mark.world_size(2, scope="module")
def test_2():
    assert seen == [os.getpid()]


@pytest.mark.world_size(2, scope="class")
class TestClass:
    def test_1(self):
        assert seen == []
        seen.append(os.getpid())

    def test_2(self):
        assert seen == [os.getpid()]
