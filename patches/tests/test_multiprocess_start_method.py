# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/test_c10d_common.py

import os
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import IS_LINUX, run_tests


@unittest.skipIf(not IS_LINUX, "Ranks are spawned on other systems than Linux")
class MultiProcessForkserverTest(MultiProcessTestCase):
    start_method = "forkserver"

    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        # The server has started before, or starts with the first of these ranks
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        os.environ["PID_OF_TEST"] = str(os.getpid())
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        del os.environ["TORCH_DISTRIBUTED_DEBUG"], os.environ["PID_OF_TEST"]

    def test_server_has_torch_and_no_device(self):
        self.assertNotEqual(str(os.getppid()), os.environ["PID_OF_TEST"])
        server = Path("/proc", str(os.getppid()))
        maps = server.joinpath("maps").read_text()
        self.assertIn("libtorch_cpu", maps)
        opened = [os.readlink(file) for file in server.joinpath("fd").iterdir()]
        for device in ("/dev/nvidia", "/dev/kfd", "/dev/dri"):
            self.assertNotIn(device, " ".join([maps, *opened]))
        torch.cuda.is_available()
        self.assertFalse(torch.cuda._is_in_bad_fork())

    def test_environment_is_that_of_the_test(self):
        self.assertEqual(dist.get_debug_level(), dist.DebugLevel.DETAIL)
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size
        )
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((1,), 2.0))
        dist.destroy_process_group()


class MultiProcessSpawnTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        os.environ["PID_OF_TEST"] = str(os.getpid())
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        del os.environ["PID_OF_TEST"]

    def test_ranks_are_children_of_the_test(self):
        self.assertEqual(str(os.getppid()), os.environ["PID_OF_TEST"])


if __name__ == "__main__":
    run_tests()
