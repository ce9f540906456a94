"""Tests of a library of collectives, as its authors write them."""

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, requires_gloo
from torch.testing._internal.common_utils import run_tests


@requires_gloo()
class CollectivesTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def init(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def test_all_reduce(self):
        self.init()
        tensor = torch.full((4,), float(self.rank))
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((4,), 1.0))

    def test_broadcast(self):
        self.init()
        tensor = torch.full((4,), float(self.rank))
        dist.broadcast(tensor, 1)
        self.assertEqual(tensor, torch.full((4,), 1.0))

    def test_all_gather(self):
        self.init()
        found = [torch.empty(1) for _ in range(2)]
        dist.all_gather(found, torch.tensor([float(self.rank)]))
        self.assertEqual(torch.cat(found), torch.tensor([0.0, 1.0]))

    def test_send_and_receive(self):
        self.init()
        tensor = torch.ones(3) * self.rank
        if self.rank:
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, 1)
        self.assertEqual(tensor, torch.ones(3))

    def test_new_group(self):
        self.init()
        group = dist.new_group([0])
        if self.rank == 0:
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()


if __name__ == "__main__":
    run_tests()
