import os

import pytest


def hold(count):
    devices = os.environ["TORCH_TESTING_EXT_FAKE_DEVICES"].split(",")
    assert len(set(devices)) == count and set(devices) <= {"a", "b", "c"}
    for device in devices:  # fails if another test holds the device
        os.close(os.open(f"held_{device}", os.O_CREAT | os.O_EXCL))
    for device in devices:
        os.unlink(f"held_{device}")


@pytest.mark.parametrize("number", range(8))
@pytest.mark.world_size(1, devices=1)
def test_one(number):
    hold(1)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.world_size(1, devices=2)
def test_two(number):
    hold(2)


@pytest.mark.world_size(2, devices=3)
def test_all(dist_env):
    if dist_env.rank == 0:
        hold(3)


@pytest.mark.world_size(1)
def test_none():
    pass


@pytest.mark.world_size(1, devices=4)
def test_too_many():
    raise AssertionError("it was run")


def test_in_the_parent():
    assert os.environ["TORCH_TESTING_EXT_FAKE_DEVICES"] == "a,b,c"
