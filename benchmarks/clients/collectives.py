"""Tests of a library of collectives, as its authors write them."""

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, requires_gloo
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests


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

    @parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16, torch.float64])
    def test_types(self, dtype):
        self.init()
        tensor = torch.arange(5).to(dtype)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, 2 * torch.arange(5).to(dtype))

    @parametrize("root", [0, 1])
    def test_scatter(self, root):
        self.init()
        parts = [torch.full((2,), 1.0), torch.full((2,), 2.0)] if self.rank == root else None
        tensor = torch.empty(2)
        dist.scatter(tensor, parts, src=root)
        self.assertEqual(tensor, torch.full((2,), self.rank + 1.0))

    def test_objects(self):
        self.init()
        found = [None, None]
        dist.all_gather_object(found, {"rank": self.rank})
        self.assertEqual([each["rank"] for each in found], [0, 1])

    def test_wait_for_work(self):
        self.init()
        tensor = torch.ones(2)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        self.assertEqual(tensor, torch.full((2,), 2.0))

    def test_error_of_a_wrong_root(self):
        self.init()
        with self.assertRaises(RuntimeError):
            dist.broadcast(torch.ones(1), 7)
        dist.barrier()

    def test_new_group(self):
        self.init()
        group = dist.new_group([0])
        if self.rank == 0:
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()


instantiate_parametrized_tests(CollectivesTest)

if __name__ == "__main__":
    run_tests()
