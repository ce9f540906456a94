# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/test_functional_api.py

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as ft_c
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import run_tests


class TestExpand(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_expand_group_name(self):
        # Two groups of two ranks: ranks 0 and 1, and ranks 2 and 3
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for group in (dist.group.WORLD, halves[dist.get_rank() // 2]):
            self.assertEqual(
                ft_c._expand_group(group.group_name), ft_c._expand_group(group)
            )
            ranks = dist.get_process_group_ranks(group)
            following = [(i + 1) % len(ranks) for i in range(len(ranks))]
            tensor = torch.full((2,), float(dist.get_rank()))
            result = ft_c.permute_tensor(tensor, following, group.group_name)
            sender = ranks[dist.get_group_rank(group, dist.get_rank()) - 1]
            self.assertEqual(result, torch.full((2,), float(sender)))


if __name__ == "__main__":
    run_tests()
