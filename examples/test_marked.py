"""A function for pytest that runs in ranks by a mark; fixtures and parameters work as usual.

Run it: python -m pytest examples/test_marked.py
"""

import pytest
import torch
import torch.distributed as dist


@pytest.mark.world_size([2, 3])
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast(dist_env, root):
    tensor = torch.tensor([dist_env.rank], device=dist_env.device)
    dist.broadcast(tensor, src=root)
    assert tensor.item() == root
