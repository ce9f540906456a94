import os
import signal

import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests

READY = 1


class TestIt(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_a_first(self):
        pass

    def test_waits(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        dist.barrier()
        if self.rank == 0:
            # One write: the reader waits for this line.
            os.write(READY, b"ready %d %d\n" % (os.getppid(), os.getpid()))
        signal.pause()

    def test_z_last(self):
        pass


if __name__ == "__main__":
    run_tests()
