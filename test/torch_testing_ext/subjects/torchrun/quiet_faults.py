"""Faults that no rank notices by itself."""

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2)


def test_other_dtype():
    dtype = torch.int32 if dist.get_rank() == 1 else torch.float32
    dist.all_reduce(torch.ones(4, dtype=dtype))


def test_leaves_state():
    torch.left_behind = True


def test_of_its_own():
    assert not hasattr(torch, "left_behind")
