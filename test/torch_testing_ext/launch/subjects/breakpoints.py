import pytest
import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests


class StopTest(MultiProcessTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_it(self):
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 3), rank=self.rank, world_size=3)
        secret = f"the secret of {self.rank}"  # noqa: F841 (the debugger is asked for it)
        if self.rank > 0:
            breakpoint()
        dist.all_reduce(torch.ones(2))
        print("all are over")

    def test_fails(self):
        value = 40 + self.rank
        if self.rank == 1:
            self.assertEqual(value, 7)
        dist.FileStore(self.file_name + "x", 2).get("never")


@pytest.mark.world_size(2)
def test_marked(dist_env):
    if dist_env.rank == 1:
        breakpoint()


if __name__ == "__main__":
    run_tests()
