"""Needs of devices: some that any GPU has, some that none has."""

import torch

from torch_testing_ext.common_distributed import (
    MultiProcessTestCase,
    requires_memory,
    requires_nvlink,
    requires_peer_access,
    requires_sm,
    skip_if_lt_x_gpu,
)
from torch_testing_ext.common_utils import TestCase, run_tests


class OneDevice(TestCase):
    @requires_memory("1 GB")
    def test_small(self):
        self.assertGreater(torch.cuda.get_device_properties(0).total_memory, 10**9)

    @requires_memory("100 TB")
    def test_huge(self):
        self.fail("no GPU has so much memory")

    @requires_sm(5)
    def test_old(self):
        self.assertGreaterEqual(torch.cuda.get_device_capability(), (5, 0))

    @requires_sm(99)
    def test_future(self):
        self.fail("no GPU has this compute capability")


class TwoDevices(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @requires_peer_access()
    @skip_if_lt_x_gpu(2)
    def test_peers(self):
        self.assertTrue(torch.cuda.can_device_access_peer(0, 1))

    @requires_nvlink()
    @skip_if_lt_x_gpu(2)
    def test_nvlink(self):
        pass


if __name__ == "__main__":
    run_tests()
