"""Properties whose ranks use GPUs: one that holds, and one that fails in a rank while the other waits for it."""

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from torch_testing_ext.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import given, settings


def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


class Properties(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def start(self):
        """Create the group, at the first example of a rank."""
        if dist.is_initialized():
            return
        if device() == "cuda":
            torch.cuda.set_device(self.rank)
        backend = dist.get_default_backend_for_device(device())
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @settings(max_examples=20, deadline=None)
    @given(values=st.lists(st.integers(-100, 100), min_size=1, max_size=8))
    def test_sum(self, values):
        self.start()
        ours = torch.tensor(values, dtype=torch.float32, device=device()) * (self.rank + 1)
        dist.all_reduce(ours)
        self.assertEqual(ours.cpu(), torch.tensor(values, dtype=torch.float32) * 3)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @settings(max_examples=20, deadline=None)
    @given(value=st.integers(0, 100))
    def test_one_rank_fails(self, value):
        self.start()
        if self.rank == 1 and value > 10:
            raise AssertionError("the value is too large")
        ours = torch.ones(4, device=device())
        dist.all_reduce(ours)
        self.assertEqual(int(ours[0]), 2)


if __name__ == "__main__":
    run_tests()
