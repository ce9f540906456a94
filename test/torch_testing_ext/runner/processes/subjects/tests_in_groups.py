"""As pytest-dependency and pytest-xdist group tests: what comes first is known to what follows."""

import pytest

seen = []


@pytest.mark.dependency()
def test_first():
    seen.append("first")


@pytest.mark.dependency(depends=["test_first"])
def test_second():
    assert seen == ["first"]


@pytest.mark.xdist_group("one")
def test_in_group():
    assert not seen
    seen.append("in a group")


@pytest.mark.xdist_group(name="one")
def test_in_the_same():
    assert seen == ["in a group"]


@pytest.mark.xdist_group("two")
def test_in_another():
    assert not seen


def test_in_none():
    assert not seen
