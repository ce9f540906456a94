"""300 tests in the same rank on a GPU, each of which ends with the memory that the first ones had."""

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcContinuousTest, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests


class Many(MultiProcContinuousTest):
    world_size = 1
    # After the tests that make the caches and the buffers of NCCL.
    expected = None

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
        in_use = torch.cuda.memory_allocated()
        if number == 10:
            type(self).expected = in_use
        if number > 10 and self.expected is not None:
            self.assertEqual(in_use, self.expected)


instantiate_parametrized_tests(Many)

if __name__ == "__main__":
    run_tests()
