"""A NaN that a rank brings to a collective."""

import torch
import torch.distributed as dist
from gpu_support import device

from torch_testing_ext.common_distributed import DistributedTestBase, sanitize, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests


class Nan(DistributedTestBase):
    world_size = 1

    def bring(self, value):
        self.create_pg(device())
        ours = torch.ones(2**12, device=device())
        ours[17] = value
        dist.all_reduce(ours)
        if device() == "cuda":
            torch.cuda.synchronize()

    @sanitize("nan")
    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_nan(self):
        self.bring(float("nan"))

    @sanitize("nan")
    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_no_nan(self):
        self.bring(2.0)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_nan_unchecked(self):
        self.bring(float("nan"))


if __name__ == "__main__":
    run_tests()
