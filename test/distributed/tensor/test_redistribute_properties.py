"""Any placements to any other ones and back: the full tensor stays what it was, and every shard is where it belongs."""

import torch
from hypothesis import strategies as st

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import device_meshes, dtensors, given, placements, settings

# What torch refuses: to make partial sums of what is replicated; before 2.15 also of shards (2.14 was not looked at).
REFUSED = "Can not redistribute from .* to P"
SHARDS_BECOME_PARTIAL = torch.__version__ >= (2, 14)


def is_refused(source, target):
    return target.is_partial() and not (source.is_shard() and SHARDS_BECOME_PARTIAL)


PROFILE = settings(max_examples=60, database=None, derandomize=True)


def with_other_placements(plan):
    others = placements(plan.mesh, plan.full, partial=())
    return st.tuples(st.just(plan), st.just(plan.full), others)


class TestRedistribute(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def check_there_and_back(self, case):
        tensor, full, others = case
        there = tensor.redistribute(placements=others)
        self.assertEqual(there.placements, others)
        self.assertEqual(there.full_tensor(), full)
        self.check_back(there, tensor.placements, full)
        self.check_shard(there, full)

    def check_back(self, there, placements, full):
        pairs = zip(there.placements, placements, strict=True)
        if any(is_refused(source, target) for source, target in pairs):
            with self.assertRaisesRegex(RuntimeError, REFUSED):
                there.redistribute(placements=placements)
            return
        self.assertEqual(there.redistribute(placements=placements).full_tensor(), full)

    def check_shard(self, tensor, full):
        """Of one sharding dim the parts are torch.chunk's: the ceiling of size over parts, the last ones less."""
        shards = [p for p in tensor.placements if p.is_shard()]
        if len(shards) != 1:
            return
        mesh_dim = tensor.placements.index(shards[0])
        size, parts = full.shape[shards[0].dim], tensor.device_mesh.size(mesh_dim)
        each = -(-size // parts)
        start = min(size, each * tensor.device_mesh.get_local_rank(mesh_dim))
        mine = full.narrow(shards[0].dim, start, min(each, size - start))
        self.assertEqual(tensor.to_local(), mine)

    @PROFILE
    @given(case=dtensors(device_meshes(max_dims=1)).flatmap(with_other_placements))
    def test_on_1d_meshes(self, case):
        self.check_there_and_back(case)

    @PROFILE
    @given(case=dtensors(device_meshes(2, 2)).flatmap(with_other_placements))
    def test_on_2d_meshes(self, case):
        self.check_there_and_back(case)


class TestRedistributeOnThreeRanks(TestRedistribute):
    world_size = 3


if __name__ == "__main__":
    run_tests()
