"""A test during which a process outside of the run takes memory of the GPU, and a later test on the same GPU."""

import os
import time
import unittest

import torch

from torch_testing_ext.common_distributed import skip_if_lt_x_gpu


class Memory(unittest.TestCase):
    @skip_if_lt_x_gpu(1)
    def test_meets_a_holder(self):
        meeting = os.environ["GPU_CHECK_MEETING"]
        torch.ones(2**20, device="cuda")
        open(f"{meeting}/test_runs", "w").close()
        while not os.path.exists(f"{meeting}/memory_is_held"):
            time.sleep(0.02)

    @skip_if_lt_x_gpu(1)
    def test_z_later(self):
        torch.ones(2**20, device="cuda")


if __name__ == "__main__":
    unittest.main()
