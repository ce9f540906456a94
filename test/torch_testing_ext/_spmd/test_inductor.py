"""The inductor backend trains like DDP in both styles, with one compilation for all batch sizes and learning rates."""

from __future__ import annotations

import functools
import os

# Compile on one thread in the rank itself, without a pool of workers that could outlive it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch._inductor.compile_fx
from spmd_training import MLP, Case, capture, normal_batch, train_both
from torch import nn

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms


def growing_batch(rank, iteration):
    """A batch size that grows with each call and differs between ranks."""
    return normal_batch(12 + 3 * iteration + rank, 10)(rank, iteration)


def clipped_step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam_fused": functools.partial(torch.optim.Adam, lr=0.01, fused=True),
}


class TestInductor(DTensorTestBase):
    """Steps compiled by inductor, against DDP on two ranks."""

    @property
    def world_size(self):
        return 2

    @parametrize("optimizer,style", [("adam_fused", "replicate"), ("sgd", "fully_shard")])
    @with_comms
    def test_trains_as_ddp(self, optimizer, style):
        make = OPTIMIZERS[optimizer]
        model = functools.partial(MLP, (10, 7, 4))
        case = Case(
            optimizer, model, growing_batch, lambda params: make(params), clipped_step, tolerance=2e-6, iterations=4
        )
        step = train_both(self, case, capture(parallel_mode=DataParallel(style), backend="inductor"))
        # The first call creates the states and is not worth compiling: it runs by fx, and the second call traces again.
        self.assertEqual((step.traces, step.report().backend), (2, "inductor"))

    @with_comms
    def test_pooling(self):
        """The decomposition of max_pool2d needs more of inductor than other operations."""

        def make():
            return nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4))

        case = Case("pooling", make, normal_batch(6, 1, 8, 8), tolerance=2e-6, iterations=2)
        step = train_both(self, case, capture(backend="inductor"))
        self.assertEqual(step.report().backend, "inductor")


instantiate_parametrized_tests(TestInductor)

if __name__ == "__main__":
    run_tests()
