"""Ranks that are killed while they are in a collective, of NCCL where there is a GPU."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_support import device, synchronize, use_gpu

from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests


def note_of(name):
    """The file that says when a rank was killed."""
    return Path(os.environ["GPU_CHECK_MEETING"], name)


def kill_soon(name):
    def kill():
        draft = note_of(f"{name}.draft")
        draft.write_text(str(time.time()))
        draft.rename(note_of(name))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Timer(1.0, kill).start()


class Alone(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @skip_if_lt_x_gpu(1)
    def test_alone(self):
        ours = use_gpu(self)
        torch.cuda._sleep(200 * 10**9)  # about 100 s
        dist.all_reduce(ours)
        kill_soon("test_alone")
        torch.cuda.synchronize()


class Two(DistributedTestBase):
    world_size = 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_with_a_peer(self):
        """Rank 1 is in the collective, and rank 0 comes to it when rank 1 is no more."""
        self.create_pg(device())
        ours = torch.ones(2**20, device=device())
        dist.all_reduce(ours)
        synchronize()
        if self.rank == 1:
            kill_soon("test_with_a_peer")
        else:
            until = time.monotonic() + 30
            while not note_of("test_with_a_peer").exists():
                self.assertLess(time.monotonic(), until, "rank 1 was not killed")
                time.sleep(0.02)
        dist.all_reduce(ours)
        synchronize()


if __name__ == "__main__":
    run_tests()
