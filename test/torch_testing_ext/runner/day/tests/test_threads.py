import torch
import torch.distributed as dist
from ranks import SIZE

from torch_testing_ext.common_distributed import MultiThreadedTestCase
from torch_testing_ext.common_utils import run_tests


class ThreadsTest(MultiThreadedTestCase):
    world_size = SIZE

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_one_thread_wrong(self):
        total = torch.ones(4)
        dist.all_reduce(total)
        self.assertEqual(total.sum().item(), 4.0 * self.world_size if self.rank else 0.0)


if __name__ == "__main__":
    run_tests()
