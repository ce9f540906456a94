"""Faults of ranks with tensors on a GPU, which the comparison of collectives and the sanitizer find."""

import torch
import torch.distributed as dist
from gpu_support import device
from torch.nn.parallel import DistributedDataParallel

from torch_testing_ext.common_distributed import DistributedTestBase, sanitize, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests, timeout


class Two(DistributedTestBase):
    world_size = 2

    def join(self):
        self.create_pg(device())
        return self.rank == 1

    @timeout(20)
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_counts_of_a_gather(self):
        """The bytes are as many, so that nothing hangs or raises."""
        dtype, count = (torch.int64, 4) if self.join() else (torch.int32, 8)
        ours = torch.ones(count, dtype=dtype, device=device())
        dist.all_gather_into_tensor(torch.empty(2 * count, dtype=dtype, device=device()), ours)

    @timeout(20)
    @sanitize()
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_other_operation(self):
        op = dist.ReduceOp.MAX if self.join() else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(4, device=device()), op)

    @timeout(60)
    @sanitize("replicas")
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_a_bit_of_a_parameter(self):
        late = self.join()
        model = DistributedDataParallel(torch.nn.Linear(4, 4, device=device()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(2, 4, device=device())).sum().backward()
            optimizer.step()
            if late and step == 1:
                model.module.bias.data.view(torch.int32)[0] ^= 1 << 12


if __name__ == "__main__":
    run_tests()
