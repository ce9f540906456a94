"""A fault that only the sanitizer sees: both ranks pass, with different results. Its message names rank, call and line.

Run it: python examples/test_finding.py
"""

import unittest

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import RankFailure, sanitize
from torch_testing_ext.ranks import spawn


def reduce(rank):
    dist.init_process_group("gloo")
    operation = dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX
    dist.all_reduce(torch.ones(4), op=operation)


@sanitize("calls")
def reduce_checked(rank):
    reduce(rank)


class FindingTest(unittest.TestCase):
    def test_without_the_sanitizer(self):
        spawn(reduce, 2)

    def test_with_the_sanitizer(self):
        finding = "rank 0 calls all_reduce .* sum, rank 1 calls all_reduce .* max"
        with self.assertRaisesRegex(RankFailure, finding):
            spawn(reduce_checked, 2)


if __name__ == "__main__":
    unittest.main()
