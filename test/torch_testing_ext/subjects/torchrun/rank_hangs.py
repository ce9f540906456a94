"""One rank never comes to a collective."""

import signal

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2, timeout=3)


def test_hang():
    if dist.get_rank() == 1:
        signal.pause()
    dist.barrier()
