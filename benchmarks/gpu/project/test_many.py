"""300 tests in the same rank on a GPU, each of which ends with the memory that the first ones had."""

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcContinuousTest, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests

FIRST = 3
# Of each test so far, in this rank.
IN_USE = []


class Many(MultiProcContinuousTest):
    world_size = 1

    @classmethod
    def backend_str(cls):
        return "nccl"

    @parametrize("number", range(300))
    @skip_if_lt_x_gpu(1)
    def test_many(self, number):
        ours = torch.ones(2**20, device="cuda", requires_grad=True)
        dist.all_reduce(ours.detach())
        (ours @ ours).backward()
        torch.cuda.synchronize()
        del ours
        IN_USE.append(torch.cuda.memory_allocated())
        # The first tests make the caches, and the buffers of NCCL.
        self.assertEqual(IN_USE[-1], IN_USE[min(len(IN_USE), FIRST) - 1])

    @skip_if_lt_x_gpu(1)
    def test_zz_in_one_rank(self):
        """By its name and its line, the last one of its class."""
        self.assertEqual(len(IN_USE), 300)


instantiate_parametrized_tests(Many)

if __name__ == "__main__":
    run_tests()
