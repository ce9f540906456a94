"""A hang on purpose: the message names the rank that is missing, its line, and the collective.

Run it: pytest examples/cookbook/test_hang.py
"""

import time

import pytest
import torch.distributed as dist

from torch_testing_ext.common_distributed import RankError
from torch_testing_ext.ranks import spawn


def rank_1_never_arrives(rank):
    if rank == 1:
        time.sleep(1000)
    dist.barrier()


def test_a_hang_is_explained():
    with pytest.raises(RankError, match="rank 1 never reached barrier #1; ranks 0, 2 are waiting in it"):
        spawn(rank_1_never_arrives, 3, backend="gloo", timeout=2)
