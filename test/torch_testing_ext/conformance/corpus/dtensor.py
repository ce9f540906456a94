"""DTensorTestBase, DTensorContinuousTestBase, DTensorOpTestBase, with_comms."""

import unittest

import torch
import torch.distributed as dist
from notes import note
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor import common_dtensor
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
    DTensorConverter,
    DTensorOpTestBase,
    DTensorTestBase,
    skip_unless_torch_gpu,
    with_comms,
)

NEWER = {
    "ContinuousTest.test_group": "2.13",
    "ContinuousTest.test_local": "2.13",
    "ContinuousTest.test_mesh": "2.13",
    "ContinuousTest.test_op": "2.13",
    "ContinuousTest.test_with_comms_does_nothing": "2.13",
}


class TwoRanks(DTensorTestBase):
    @property
    def world_size(self):
        return 2


class AttributesTest(TwoRanks):
    def test_device_and_backend(self):
        note(self, self.device_type, self.backend, self.world_size, self.is_local_tensor_enabled)

    def test_no_group(self):
        note(self, dist.is_initialized())

    def test_num_devices(self):
        note(self, common_dtensor.NUM_DEVICES, common_dtensor.DEVICE_TYPE)


class CommsTest(TwoRanks):
    @with_comms
    def test_group(self):
        note(self, dist.is_initialized(), dist.get_backend(), dist.get_rank())

    @with_comms()
    def test_called(self):
        note(self, dist.get_world_size())

    @with_comms(backend="gloo")
    def test_backend(self):
        note(self, dist.get_backend())

    @with_comms(eager_init=True)
    def test_eager(self):
        note(self, dist.get_backend())

    @with_comms(backend="made_up")
    def test_unknown_backend(self):
        note(self, "body")

    @with_comms
    def test_mesh(self):
        mesh = self.build_device_mesh()
        note(self, mesh.device_type, mesh.shape, mesh.ndim)

    @with_comms
    def test_distribute(self):
        mesh = self.build_device_mesh()
        tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        note(self, tensor.to_local().tolist(), tensor.full_tensor().tolist())

    @with_comms
    def test_raises(self):
        dist.barrier()
        raise ValueError("with a group")

    @with_comms
    def test_skips(self):
        self.skipTest("with a group")

    @with_comms
    def test_subtests(self):
        self.run_subtests({"n": [1, 2]}, self.check)

    def check(self, n):
        note(self, n)

    @with_comms
    def test_manual_seed(self):
        self.init_manual_seed_for_rank()
        note(self, torch.initial_seed())

    @with_comms
    def test_op(self):
        mesh = self.build_device_mesh()
        self._test_op(mesh, torch.add, torch.ones(4), torch.ones(4))

    @with_comms
    def test_op_on_dtensor(self):
        mesh = self.build_device_mesh()
        tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        self._test_op_on_dtensor(torch.neg, tensor)

    @with_comms
    def test_converter(self):
        mesh = self.build_device_mesh()
        count = 0
        for args, _ in DTensorConverter(mesh, (torch.ones(4, 4),), {}):
            count += isinstance(args[0], DTensor)
        note(self, count)

    @with_comms
    def test_assert_equal_of_dtensors(self):
        mesh = self.build_device_mesh()
        tensor = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        self.assertEqual(tensor.to_local(), torch.ones(4))

    @skip_unless_torch_gpu
    @with_comms
    def test_gpus(self):
        note(self, "body")


class DefaultSizeTest(DTensorTestBase):
    @with_comms
    def test_all_devices(self):
        note(self, self.world_size, dist.get_world_size())


class OwnInitPgTest(TwoRanks):
    def init_pg(self, eager_init, backend=None):
        note(self, "own init_pg", eager_init, backend)
        super().init_pg(eager_init, backend)

    def destroy_pg(self, device_id=None):
        note(self, "own destroy_pg", device_id)
        super().destroy_pg(device_id)

    @with_comms
    def test_both_are_called(self):
        note(self, "body")

    @with_comms
    def test_raises(self):
        dist.barrier()
        raise ValueError("no destroy_pg")


class OwnBackendTest(TwoRanks):
    @property
    def backend(self):
        return "cpu:gloo,cpu:gloo"

    @property
    def device_type(self):
        return "cpu"

    @with_comms
    def test_used(self):
        note(self, dist.get_backend())


class SetUpTest(TwoRanks):
    def setUp(self):
        note(self, "before")
        super().setUp()
        note(self, len(self.processes))

    @with_comms
    def test_started_by_set_up(self):
        note(self, "body")


class ContinuousTest(DTensorContinuousTestBase):
    world_size = 2

    def test_group(self):
        note(self, dist.get_backend(), dist.get_world_size(), self.rank, self.device_type)

    def test_mesh(self):
        mesh = self.build_device_mesh()
        note(self, mesh.shape, distribute_tensor(torch.arange(4), mesh, [Shard(0)]).to_local().tolist())

    @with_comms
    def test_with_comms_does_nothing(self):
        note(self, dist.is_initialized())

    def test_local(self):
        note(self, self.is_local_tensor_enabled)

    def test_op(self):
        self._test_op(self.build_device_mesh(), torch.neg, torch.ones(2))


class ThreadsTest(DTensorOpTestBase):
    @property
    def world_size(self):
        return 2

    def test_device(self):
        note(self, self.device_type, self.rank, dist.get_backend())

    def test_mesh(self):
        note(self, self.build_device_mesh().shape)

    def test_distribute(self):
        tensor = distribute_tensor(torch.arange(4.0), self.build_device_mesh(), [Shard(0)])
        note(self, tensor.to_local().tolist())

    @with_comms
    def test_with_comms_does_nothing(self):
        note(self, dist.get_world_size())

    def test_redistribute(self):
        tensor = distribute_tensor(torch.arange(4.0), self.build_device_mesh(), [Shard(0)])
        note(self, tensor.redistribute(placements=[Replicate()]).to_local().tolist())

    def test_fails(self):
        raise ValueError("in threads")

    @unittest.skip("by unittest")
    def test_skipped(self):
        note(self, "body")


class DefaultThreadsTest(DTensorOpTestBase):
    def test_number(self):
        note(self, self.world_size)


if __name__ == "__main__":
    run_tests()
