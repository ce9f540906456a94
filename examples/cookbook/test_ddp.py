"""DDP gives the gradients of one process that sees the whole batch.

Run it: pytest examples/cookbook/test_ddp.py
"""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


@pytest.mark.world_size([2, 4])
def test_gradients_are_those_of_one_process(dist_env):
    device, rank, size = dist_env.device, dist_env.rank, dist_env.world_size
    batch = torch.arange(8.0 * 8).reshape(8, 8).to(device) / 64
    alone = make_model().to(device)
    alone(batch).mean().backward()

    ddp = DistributedDataParallel(make_model().to(device))
    ddp(batch.chunk(size)[rank]).mean().backward()

    for mine, expected in zip(ddp.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
