"""One rank fails before a collective; the next test is right."""

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2)


def test_rank_fails():
    assert dist.get_rank() == 0
    dist.all_reduce(torch.ones(1))


def test_right():
    total = torch.tensor([10.0])
    dist.all_reduce(total)
    assert total.item() == 20
