import pytest
import torch
import torch.distributed as dist
from failing_collectives import reduce_differently, reduce_nan

from torch_testing_ext.common_distributed import sanitize


@pytest.mark.world_size(2)
def test_op(dist_env):
    reduce_differently()


@pytest.mark.world_size(2)
@sanitize("nan")
def test_nan(dist_env):
    reduce_nan()


@pytest.mark.world_size(2)
def test_passes(dist_env):
    dist.all_reduce(torch.ones(4))
