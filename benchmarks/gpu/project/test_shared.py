"""Four ranks on as many GPUs as there are, with each base. Run it with --ranks-per-gpu 4 where there are fewer."""

import torch
import torch.distributed as dist
from gpu_support import check_collectives, device, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from torch_testing_ext._machine.device_sharing import CONTEXT
from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcContinuousTest, skip_if_lt_x_gpu
from torch_testing_ext.common_fsdp import FSDPTest, FSDPTestContinuous
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms


def check_device(test):
    """The rank's device is the one that it shares, and it may not take all of its memory."""
    if device() == "cpu":
        return
    count = torch.cuda.device_count()
    test.assertEqual(torch.cuda.current_device(), dist.get_rank() % count)
    if dist.get_world_size() > count:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        with test.assertRaises(torch.OutOfMemoryError):
            torch.empty(int(0.6 * total), dtype=torch.uint8, device=device())


def check_context(test):
    """What a rank has on the GPU besides its tensors is no more than we reckon with. Each rank has used its group."""
    if device() == "cpu" or torch.cuda.device_count() > 1:
        return
    reserved = torch.tensor(torch.cuda.memory_reserved(), device=device())
    dist.all_reduce(reserved)
    free, total = torch.cuda.mem_get_info()
    context = (total - free - int(reserved)) // dist.get_world_size()
    print(f"a rank has {context >> 20} MiB besides its tensors")
    test.assertLessEqual(context, CONTEXT)
    # Until here, no rank ends.
    dist.barrier()


class CreatePg(DistributedTestBase):
    world_size = 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_create_pg(self):
        self.create_pg(device())
        check_device(self)
        check_collectives(self)
        check_context(self)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_ddp(self):
        self.create_pg(device())
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(32, 32, device=device()))
        torch.manual_seed(self.rank)
        model(torch.randn(8, 32, device=device())).sum().backward()
        grads = [torch.empty_like(model.module.weight) for _ in range(4)]
        dist.all_gather(grads, model.module.weight.grad)
        for other in grads[1:]:
            self.assertEqual(grads[0], other)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_the_number_of_the_rank_as_device(self):
        if device() == "cuda":
            torch.cuda.set_device(self.rank)
        self.create_pg(device())
        mesh = init_device_mesh(device(), (2, 2), mesh_dim_names=("dp", "tp"))
        check_device(self)
        self.assertEqual(mesh.size(), 4)


class OfDTensor(DTensorTestBase):
    world_size = 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @with_comms
    def test_dtensor(self):
        self.assertEqual(self.device_type, device())
        tensor = distribute_tensor(torch.arange(8.0), self.build_device_mesh(), [Shard(0)])
        self.assertEqual(tensor.to_local().cpu(), torch.arange(8.0).chunk(4)[self.rank])
        self.assertEqual(tensor.full_tensor().cpu(), torch.arange(8.0))


class OfFsdp(FSDPTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fsdp(self):
        self.assertGreaterEqual(self.world_size, 4)
        train(self)


class OfFsdpContinuous(FSDPTestContinuous):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fsdp_continuous(self):
        train(self)


class Continuous(MultiProcContinuousTest):
    world_size = 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_continuous(self):
        if device() == "cuda":
            torch.cuda.set_device(self.rank)
        check_device(self)
        check_collectives(self)


if __name__ == "__main__":
    run_tests()
