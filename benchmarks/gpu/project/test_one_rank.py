"""One rank on a GPU, with each base: the group has the GPU's own backend, and tensors are on the GPU."""

import torch
import torch.distributed as dist
from gpu_support import check_collectives, device, train
from torch.distributed.tensor import Shard, distribute_tensor

from torch_testing_ext.common_distributed import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    skip_if_lt_x_gpu,
)
from torch_testing_ext.common_fsdp import FSDPTest, FSDPTestContinuous
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms


def backend():
    return dist.get_default_backend_for_device(device())


class CreatePg(DistributedTestBase):
    world_size = 1

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_create_pg(self):
        self.create_pg(device())
        self.assertEqual(dist.get_backend(), backend())
        check_collectives(self)


class Plain(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_plain(self):
        if device() == "cuda":
            torch.cuda.set_device(self.rank)
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(backend(), store=store, rank=self.rank, world_size=self.world_size)
        check_collectives(self)


class OfDTensor(DTensorTestBase):
    world_size = 1

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    @with_comms
    def test_dtensor(self):
        self.assertEqual(self.device_type, device())
        tensor = distribute_tensor(torch.arange(8.0), self.build_device_mesh(), [Shard(0)])
        self.assertEqual(tensor.full_tensor().cpu(), torch.arange(8.0))
        self.assertEqual(tensor.to_local().device.type, device())

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    @with_comms(eager_init=True)
    def test_dtensor_eager(self):
        check_collectives(self)


class OfFsdp(FSDPTest):
    world_size = 1

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_fsdp(self):
        train(self)


class OfFsdpContinuous(FSDPTestContinuous):
    world_size = 1

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_fsdp_continuous(self):
        train(self)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_fsdp_continuous_again(self):
        check_collectives(self)


class Continuous(MultiProcContinuousTest):
    world_size = 1

    @classmethod
    def backend_str(cls):
        return backend()

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_continuous(self):
        check_collectives(self)


if __name__ == "__main__":
    run_tests()
