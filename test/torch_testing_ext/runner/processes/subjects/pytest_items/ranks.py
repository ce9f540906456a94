import os
import time
import unittest

import pytest
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase


def leased():
    return os.environ["TESTACC_VISIBLE_DEVICES"]


@pytest.mark.world_size(2, devices=2)
def test_sum(dist_env):
    print("rank", dist_env.rank, "has", leased())
    assert dist.get_world_size() == 2 and dist_env.device.type == "testacc"
    assert sorted(leased().split(",")) == ["0", "1"]


@pytest.mark.world_size([1, 2])
def test_sizes(dist_env):
    assert len(leased().split(",")) == dist_env.devices == dist_env.world_size and dist_env.rank == 0


@pytest.mark.world_size(2, timeout=4)
def test_hangs(dist_env):
    if dist_env.rank:
        time.sleep(1000)


@pytest.mark.world_size(2, devices=3)
def test_wants_more():
    raise AssertionError("it was run")


class UnittestTest(unittest.TestCase):
    @pytest.mark.world_size(2)
    def test_in_ranks(self):
        self.assertEqual(os.environ["WORLD_SIZE"], "2")

    @pytest.mark.skip(reason="by a mark")
    def test_skip_of_pytest(self):
        raise AssertionError("it was run")

    @pytest.mark.xfail
    def test_xfail_of_pytest(self):
        self.fail()

    @pytest.mark.slow
    @unittest.expectedFailure
    def test_expected_to_fail(self):
        pass


@pytest.mark.slow
class RankedTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_of_ranked_case(self):
        self.assertEqual(self.rank, 0)


class FixtureTest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def prepare(self):
        self.prepared = True

    def test_fixture_of_pytest(self):
        self.assertTrue(self.prepared)
