"""Debugging: uncomment the breakpoint, and run it in a terminal. `rank 1` at the prompt goes to rank 1.

Run it: pytest examples/cookbook/test_debugging.py
"""

import pytest
import torch
import torch.distributed as dist


@pytest.mark.world_size(2)
def test_sum(dist_env):
    tensor = torch.ones(2, device=dist_env.device) * dist_env.rank
    # breakpoint()
    dist.all_reduce(tensor)
    # Shown if the test fails, or with -s, each line with its rank.
    print(f"after all_reduce: {tensor.tolist()}")
    assert tensor.tolist() == [1.0, 1.0]
