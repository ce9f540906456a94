"""DistributedTestBase and run_subtests."""

import os

import torch
import torch.distributed as dist
from notes import note
from torch.testing._internal.common_distributed import DistributedTestBase, run_subtests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests


class GroupTest(DistributedTestBase):
    world_size = 2

    def test_group(self):
        group = self.create_pg("cpu")
        dist.barrier()  # with PyTorch's base, a rank that leaves now breaks the connections of a slower one
        note(self, group is dist.group.WORLD, dist.get_backend(), dist.get_rank(), dist.get_world_size())

    def test_collective(self):
        self.create_pg("cpu")
        tensor = torch.full((2,), float(self.rank))
        dist.all_reduce(tensor)
        note(self, tensor.tolist())

    def test_backends(self):
        note(self, [self.backend(device) for device in ("cpu", "cuda", "cuda:1", "hpu", "xpu", "mps")])

    def test_world_size_in_the_environment(self):
        note(self, os.environ["WORLD_SIZE"])

    def test_rank_to_device(self):
        note(self, self.rank_to_device("cpu"))

    def test_fails(self):
        self.create_pg("cpu")
        dist.barrier()
        raise ValueError("with a group")

    def test_skips_with_a_group(self):
        self.create_pg("cpu")
        dist.barrier()
        self.skipTest("with a group")


class DefaultSizeTest(DistributedTestBase):
    def test_four(self):
        note(self, self.world_size, os.environ["WORLD_SIZE"])


class OwnBackendTest(DistributedTestBase):
    world_size = 2

    def backend(self, device):
        return f"cpu:gloo,{device}:gloo" if device != "cpu" else "cpu:gloo"

    def test_used(self):
        self.create_pg("cpu")
        dist.barrier()
        note(self, dist.get_backend_config())


class OwnSetUpTest(DistributedTestBase):
    world_size = 1

    def setUp(self):
        note(self, "before")
        super().setUp()
        note(self, "after", os.environ.get("WORLD_SIZE"), len(self.processes))

    def tearDown(self):
        note(self, "tearDown")
        super().tearDown()

    def test_once(self):
        note(self, "body")


class SubtestsTest(DistributedTestBase):
    world_size = 2

    def test_product(self):
        self.create_pg("cpu")
        run_subtests(self, {"a": [1, 2], "b": ["x", "y"]}, self.check, "first", more="kept")

    def check(self, first, a, b, more):
        note(self, first, a, b, more)

    def test_empty(self):
        self.create_pg("cpu")
        run_subtests(self, {}, self.check_none)

    def check_none(self):
        note(self, "once")


class FailingSubtestsTest(DistributedTestBase):
    world_size = 1

    def test_raises(self):
        self.create_pg("cpu")
        run_subtests(self, {"n": [1, 2, 3]}, self.check)

    def check(self, n):
        note(self, n)
        if n == 2:
            raise ValueError("the second")


class ParametrizedTest(DistributedTestBase):
    world_size = 1

    @parametrize("size", [1, 3])
    @parametrize("dtype", [torch.float32, torch.int64])
    def test_sizes(self, size, dtype):
        note(self, size, dtype, torch.ones(size, dtype=dtype).sum().item())


instantiate_parametrized_tests(ParametrizedTest)

if __name__ == "__main__":
    run_tests()
