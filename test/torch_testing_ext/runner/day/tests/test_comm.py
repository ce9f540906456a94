import torch
import torch.distributed as dist
from ranks import RanksTestCase

from torch_testing_ext.common_utils import run_tests


class CommTest(RanksTestCase):
    def test_sum(self):
        self.join()
        total = torch.ones(4)
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((4,), float(self.world_size)))

    def test_all_ranks_wrong(self):
        self.join()
        total = torch.ones(4)
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((4,), 5.0))

    def test_one_rank_wrong(self):
        self.join()
        total = torch.ones(4) * (1 if self.rank else 2)
        dist.all_reduce(total)
        if self.rank == 1:
            total[2] = 0
        self.assertEqual(total, torch.full((4,), self.world_size + 1.0))

    def test_each_rank_has_another_value(self):
        self.join()
        self.assertEqual(torch.full((2, 3), float(self.rank)), torch.full((2, 3), -1.0))


if __name__ == "__main__":
    run_tests()
