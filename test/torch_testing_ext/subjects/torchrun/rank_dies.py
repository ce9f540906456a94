"""One rank dies, while another one runs the next test."""

import os
import signal

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2)


def test_before(): ...


def test_rank_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_after():
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.pause()  # until torchrun ends it
