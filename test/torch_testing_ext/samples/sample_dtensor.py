"""DTensor in threads and in persistent ranks, written as in PyTorch's tree."""

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
    DTensorConverter,
    DTensorOpTestBase,
    LocalDTensorContinuousTestBase,
    create_local_tensor_test_class,
    with_comms,
)

with FakeTensorMode():  # torch 2.11 with CUDA but without a GPU dies if threads enter their first one together
    pass


class TestOperators(DTensorOpTestBase):
    @with_comms
    def test_add(self):
        mesh = self.build_device_mesh()
        pair = (torch.arange(8.0), torch.ones(8))
        for args, _ in DTensorConverter(mesh, pair, {}):
            self.assertEqual((args[0] + args[1]).full_tensor(), pair[0] + pair[1])

    def test_matmul_backward(self):
        left = distribute_tensor(torch.ones(4, 4), self.build_device_mesh(), [Shard(0)]).requires_grad_()
        (left @ left).sum().backward()
        self.assertEqual(left.grad.full_tensor(), torch.full((4, 4), 8.0))


class TestInPersistentRanks(DTensorContinuousTestBase):
    world_size = 4

    def test_redistribute(self):
        mesh = self.build_device_mesh()
        full = torch.arange(8.0)
        self.assertEqual(distribute_tensor(full, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local(), full)

    def test_world_size(self):
        self.assertEqual(dist.get_world_size(), self.world_size)

    def test_seed(self):
        self.init_manual_seed_for_rank()
        self.assertEqual(distribute_tensor(torch.ones(4), self.build_device_mesh(), [Shard(0)]).to_local().numel(), 1)


TestOnLocalTensors = create_local_tensor_test_class(
    TestInPersistentRanks, base_class=LocalDTensorContinuousTestBase, skipped_tests=["test_seed"]
)

if __name__ == "__main__":
    run_tests()
