"""FSDP2 trains like the unsharded model, and each rank holds only its part.

Run it: pytest examples/cookbook/test_fsdp2.py
"""

import pytest
import torch
from torch.distributed.fsdp import fully_shard


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


@pytest.mark.world_size(2)
def test_three_steps(dist_env):
    batch = torch.linspace(-1, 1, 5 * 8).reshape(5, 8).to(dist_env.device)
    alone, sharded = make_model().to(dist_env.device), make_model().to(dist_env.device)
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)

    for model in (alone, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    for shard, expected in zip(sharded.parameters(), alone.parameters(), strict=True):
        assert shard.to_local().numel() == expected.numel() // 2
        torch.testing.assert_close(shard.full_tensor(), expected)
