"""Two ranks with a GPU each over NCCL, of which one is killed or stopped: what the other sees in its next operation.

What it sees is reported, not judged: each test passes if the fault has happened and the other rank has gone on.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.faults import fault_point, faults, kill, mark, stop

LOST = 1
TIMEOUT = timedelta(seconds=5)


class Gone(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join(self, name, size):
        # The watchdog would end the rank that is left.
        os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_BLOCKING_WAIT="1")
        torch.cuda.set_device(self.rank)
        store = dist.FileStore(f"{self.file_name}.{name}", size)
        dist.init_process_group("nccl", store=store, rank=self.rank, world_size=size, timeout=TIMEOUT)

    def see(self, operation):
        """Lose rank 1, and note what this operation of rank 0 does then."""
        self.join("first", 2)
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        fault_point("gone")
        began, told = time.monotonic(), "returns"
        try:
            operation()
            torch.cuda.synchronize()
        except Exception as error:
            told = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        text = f"{told}, after {time.monotonic() - began:.1f} s"
        Path(os.environ["GPU_CHECK_TOLD"], self._testMethodName).write_text(text)

    @skip_if_lt_x_gpu(2)
    @faults(kill(LOST, at=mark("gone")), within=40)
    def test_all_reduce(self):
        self.see(lambda: dist.all_reduce(torch.ones(1, device="cuda")))

    @skip_if_lt_x_gpu(2)
    @faults(kill(LOST, at=mark("gone")), within=40)
    def test_broadcast(self):
        self.see(lambda: dist.broadcast(torch.ones(1, device="cuda"), 0))

    @skip_if_lt_x_gpu(2)
    @faults(kill(LOST, at=mark("gone")), within=40)
    def test_message(self):
        self.see(lambda: dist.send(torch.ones(1, device="cuda"), LOST))

    @skip_if_lt_x_gpu(2)
    @faults(stop(rank=LOST, at=mark("gone")), within=40)
    def test_stopped(self):
        self.see(lambda: dist.all_reduce(torch.ones(1, device="cuda")))

    @skip_if_lt_x_gpu(2)
    @faults(kill(LOST, at=mark("gone")), within=40)
    def test_abort_and_new_world(self):
        self.see(self.go_on)

    def go_on(self):
        dist.distributed_c10d._abort_process_group()
        self.join("second", 1)
        dist.all_reduce(torch.ones(1, device="cuda"))


if __name__ == "__main__":
    run_tests()
