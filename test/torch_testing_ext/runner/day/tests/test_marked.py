import pytest
import torch
import torch.distributed as dist
from ranks import SIZE


@pytest.mark.world_size(SIZE)
def test_sum(dist_env):
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [SIZE] * 2


@pytest.mark.world_size(SIZE)
def test_wrong_sum(dist_env):
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [7.0, 7.0]


@pytest.mark.world_size(SIZE)
@pytest.mark.parametrize("size", [8])
def test_wrong_call(dist_env, size):
    if dist_env.rank == 1:
        dist.broadcast(torch.ones(size), 0)
    else:
        dist.all_reduce(torch.ones(4))
