"""Tests in ranks, written for few of them: sound in a larger world, or not, or not for whole worlds at all."""

import subprocess

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing import assert_close

from torch_testing_ext.common_distributed import (
    DynamoDistributedMultiProcTestCase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    skip_if_lt_x_gpu,
)
from torch_testing_ext.common_fsdp import FSDPTest, FSDPTestContinuous
from torch_testing_ext.common_utils import TestCase
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_testing_ext.faults import call, faults, kill
from torch_testing_ext.worlds import whole_world


class FourRanks(MultiProcessTestCase):
    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def init(self, size=None):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=size or self.world_size, store=store)

    def sum_of_ones(self):
        self.init()
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        return tensor

    def sum_of_ranks(self):
        """No rank can know it, also not by what it has itself."""
        self.init()
        tensor = torch.tensor(self.rank)
        dist.all_reduce(tensor)
        return tensor

    def test_sound(self):
        tensor = self.sum_of_ones()
        self.assertEqual(tensor, torch.full((4,), float(self.world_size)))
        torch.testing.assert_close(tensor, torch.full((4,), float(self.world_size)))
        assert_close(tensor, torch.full((4,), float(self.world_size)))  # by its own name
        dist.barrier()
        dist.destroy_process_group()

    def test_own_values_by_name(self):
        self.init()
        assert_close(torch.ones(2), torch.zeros(2))

    def test_group_of_four(self):
        self.init()
        nodes = [dist.new_group(list(range(first, first + 4))) for first in range(0, self.world_size, 4)]
        dist.all_reduce(torch.ones(4), group=nodes[self.rank // 4])
        if self.rank < 4:
            dist.barrier()  # fault

    def test_ring_that_forgets_the_last(self):
        self.init()
        last = 3
        if self.rank < last:
            dist.send(torch.ones(2), self.rank + 1)
        if self.rank > 0:
            dist.recv(torch.ones(2), self.rank - 1)

    def test_uneven(self):
        self.init()
        rows = torch.ones(12).tensor_split(self.world_size)[self.rank]
        dist.all_gather_into_tensor(torch.empty(rows.numel() * self.world_size), rows)

    def test_fixed(self):
        self.init(2)

    def test_bare_assertion(self):
        assert self.sum_of_ranks().item() == sum(range(self.world_size))

    def test_mismatch_before_a_bare_assertion(self):
        tensor = self.sum_of_ranks()
        dist.all_reduce(torch.ones(4 + self.rank // 4))
        assert tensor.item() == sum(range(self.world_size))

    def test_assertion_on_one_rank(self):
        tensor = self.sum_of_ranks()
        if self.rank == 0:
            assert tensor.item() == sum(range(self.world_size))
        dist.barrier()

    def test_own_values(self):
        self.init()
        self.assertEqual(dist.get_world_size(), 4)

    def test_starts_a_process(self):
        self.init()
        subprocess.run(["true"], check=True)

    def test_asks_nobody(self):
        dist.FileStore(self.file_name, self.world_size).get("unset")

    @faults(kill(1, at=call(1)))
    def test_faults(self):
        self.init()

    def test_skips(self):
        self.skipTest("not today")


class OwnRanks(FourRanks):
    def _check_return_codes(self, fn, elapsed_time):
        pass


class Continuous(MultiProcContinuousTest):
    world_size = 2

    def test_hangs(self):
        if self.rank == 0:
            dist.barrier()

    async def test_runs_nothing(self):
        dist.barrier()

    def test_sum(self):
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((4,), float(self.world_size)))
        self.assertEqual(dist.get_world_size(), self.world_size)


class Threads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self):
        self.is_set_up = True

    def test_hangs(self):
        if self.rank == 0:
            dist.barrier()

    async def test_runs_nothing(self):
        dist.barrier()

    def test_sum(self):
        self.assertTrue(self.is_set_up)
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((4,), float(self.world_size)))


class OnMesh(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms
    def test_gather(self):
        mesh = self.build_device_mesh()
        whole = distribute_tensor(torch.ones(16, 2), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        self.assertEqual(whole.to_local(), torch.ones(16, 2))


def shards():
    """Take a step of a sharded model."""
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    return model.weight.full_tensor()


class Sharded(FSDPTest):
    def test_step(self):
        self.assertEqual(shards(), torch.zeros(8, 8))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_step_on_cpu(self):
        self.assertEqual(shards(), torch.zeros(8, 8))

    @skip_if_lt_x_gpu(1000)
    def test_many_devices(self):
        self.fail("it runs")


class ShardedContinuous(FSDPTestContinuous):
    def test_step(self):
        self.assertEqual(shards(), torch.zeros(8, 8))


class OnAllDevices(DynamoDistributedMultiProcTestCase):
    def test_sum(self):
        self.create_pg("cpu")
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.zeros(4))


class ByItself(TestCase):
    @whole_world(2)
    def test_size(self, rank, world_size):
        assert world_size == dist.get_world_size() == 8
