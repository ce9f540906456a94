import os

import pytest


def leased():
    return [name for name in os.environ.get("TORCH_TESTING_EXT_FAKE_DEVICES", "").split(",") if name]


@pytest.mark.world_size(2)
def test_auto(dist_env):
    assert (dist_env.devices, len(leased()), dist_env.backend) == (2, 2, "gloo")


@pytest.mark.world_size(4)
def test_more_ranks_than_devices(dist_env):
    assert (dist_env.devices, dist_env.device.type, dist_env.backend) == (0, "cpu", "gloo")


@pytest.mark.world_size(2, devices=0)
def test_cpu(dist_env):
    assert (dist_env.devices, dist_env.device.type, dist_env.backend) == (0, "cpu", "gloo")


@pytest.mark.world_size(2, backend="gloo")
def test_gloo(ranks):
    assert ranks.devices == 0


@pytest.mark.world_size(2, backend="gloo", devices="auto")
def test_gloo_on_devices(ranks):
    assert ranks.devices == 2


@pytest.mark.world_size(1, devices=4)
def test_needs_four():
    raise AssertionError("it was run")
