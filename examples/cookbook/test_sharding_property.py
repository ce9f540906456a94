"""A property: whatever its shape, a tensor comes back unchanged from being sharded.

Run it: pytest examples/cookbook/test_sharding_property.py
"""

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.hypothesis_utils import given, settings


class ShardingTest(MultiProcessTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @settings(max_examples=20)
    @given(rows=st.integers(0, 7), columns=st.integers(1, 3), dim=st.integers(0, 1))
    def test_there_and_back(self, rows, columns, dim):
        tensor = torch.arange(float(rows * columns)).reshape(rows, columns)
        mesh = init_device_mesh("cpu", (self.world_size,))
        assert torch.equal(distribute_tensor(tensor, mesh, [Shard(dim)]).full_tensor(), tensor)
