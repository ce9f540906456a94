"""A property that holds for all inputs that Hypothesis finds, in every rank: all ranks get the same examples.

Run it: python examples/test_property.py
"""

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import given, per_rank, settings


class PropertyTest(MultiProcessTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @settings(max_examples=20)
    @given(size=st.integers(1, 30), mine=per_rank(st.integers(-10, 10)))
    def test_no_rank_exceeds_the_maximum(self, size, mine):
        largest = torch.full((size,), mine)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert (largest >= mine).all()


if __name__ == "__main__":
    run_tests()
