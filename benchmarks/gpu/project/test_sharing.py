"""Small tests on one GPU, which could run side by side."""

import time
import unittest

import torch

from torch_testing_ext.common_distributed import skip_if_lt_x_gpu


class Small(unittest.TestCase):
    def use_a_little(self):
        kept = torch.ones(64 * 2**20, dtype=torch.uint8, device="cuda")
        time.sleep(1.5)
        self.assertEqual(int(kept[-1]), 1)


for number in range(6):
    method = skip_if_lt_x_gpu(1)(lambda self: self.use_a_little())
    setattr(Small, f"test_small_{number}", method)


if __name__ == "__main__":
    unittest.main()
