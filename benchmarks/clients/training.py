"""Tests of a training library on DistributedDataParallel, as its authors write them."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests


class TrainingTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def train(self, make_optimizer, steps=3, **options):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        alone = copy.deepcopy(model)
        wrapped = DistributedDataParallel(model, **options)
        mine, theirs = make_optimizer(model.parameters()), make_optimizer(alone.parameters())
        for _ in range(steps):
            batches = torch.randn(self.world_size, 6, 8)
            for net, optimizer, batch in ((wrapped, mine, batches[self.rank]), (alone, theirs, batches.flatten(0, 1))):
                optimizer.zero_grad()
                net(batch).pow(2).mean().backward()
                optimizer.step()
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            self.assertEqual(a, b)

    def test_sgd(self):
        self.train(lambda params: torch.optim.SGD(params, lr=0.1))

    def test_adam(self):
        self.train(lambda params: torch.optim.Adam(params, lr=0.01))

    def test_small_buckets(self):
        self.train(lambda params: torch.optim.SGD(params, lr=0.1), bucket_cap_mb=1)

    def test_gradients_as_views(self):
        self.train(lambda params: torch.optim.SGD(params, lr=0.1), gradient_as_bucket_view=True)

    def test_momentum(self):
        self.train(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True))

    def test_weight_decay(self):
        self.train(lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1))

    def test_static_graph(self):
        self.train(lambda params: torch.optim.SGD(params, lr=0.1), static_graph=True)

    def test_unused_parameters(self):
        self.train(lambda params: torch.optim.SGD(params, lr=0.1), find_unused_parameters=True)

    def test_more_steps(self):
        self.train(lambda params: torch.optim.RMSprop(params, lr=0.01), steps=10)


if __name__ == "__main__":
    run_tests()
