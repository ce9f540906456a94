import unittest

import pytest
import torch
import torch.distributed as dist


@pytest.mark.world_size(2)
def test_sum(dist_env):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    torch.testing.assert_close(tensor, torch.full((4,), 2.0))
    assert dist_env.world_size == dist.get_world_size() == 5


@pytest.mark.world_size(2)
def test_ring(dist_env):
    if dist_env.rank < dist_env.world_size - 1:
        dist.send(torch.ones(2), dist_env.rank + 1)
    dist.recv(torch.ones(2), (dist_env.rank - 1) % dist_env.world_size)


@pytest.mark.world_size(2)
def test_bare(dist_env):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor[0] == 2


@pytest.mark.world_size(2)
@pytest.mark.xfail(strict=True)
def test_expected(dist_env):
    assert dist_env.world_size == 2


@pytest.mark.world_size(2, scope="module")
def test_shared(dist_env):
    pass


def test_plain():
    pass


class PlainTest(unittest.TestCase):
    def test_plain(self):
        pass
