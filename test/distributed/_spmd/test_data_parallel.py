# Owner(s): ["oncall: distributed"]
"""A compiled train step has the same result as a step under DistributedDataParallel.

PyTorch removed `torch.distributed._spmd` in 2.5, and had disabled this suite before. As in the original, both models
first take one eager step to create the optimizer's states. All ranks share the data of that step; in the compared step
each rank has its own data. Unlike in the original, every rank starts with its own weights, and so has other weights and
optimizer states before the compared step. Both DDP and the compiled step must take rank 0's.
"""

from copy import deepcopy

import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.distributed._spmd.api import compile
from torch_testing_ext.distributed._spmd.parallel_mode import DataParallel
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

BATCH = 128


class SimpleMLP(nn.Module):
    """Two linear layers."""

    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(50, 32)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(32, 8)

    def forward(self, x):
        return torch.sigmoid(self.net2(self.relu(self.net1(x))))


def train_step(model, optim, train_batch):
    optim.zero_grad()
    inputs, labels = train_batch
    loss = (model(inputs) - labels).sum()
    loss.backward()
    optim.step()
    return loss


class TestDataParallel(DTensorTestBase):
    """One compiled step against one step of DDP, on two ranks."""

    @property
    def world_size(self):
        return 2

    def _batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        inputs, labels = torch.randn(BATCH, 50, generator=generator), torch.randn(BATCH, 8, generator=generator)
        return inputs.to(self.device_type), labels.to(self.device_type)

    def _check(self, style, make_optimizer, model=None, step=train_step, batch=None, exact=True, **options):
        batch = batch or self._batch
        torch.manual_seed(self.rank)
        model = (model or SimpleMLP)().to(self.device_type)
        reference = DDP(deepcopy(model))
        optim, ddp_optim = make_optimizer(model.parameters()), make_optimizer(reference.parameters())

        step(reference, ddp_optim, batch(seed=0))
        step(model, optim, batch(seed=0))
        before = [p.detach().clone() for p in model.parameters()]

        expected = step(reference, ddp_optim, batch(seed=1 + self.rank))
        compiled = compile(parallel_mode=DataParallel(style, **options))(step)
        result = compiled(model, optim, batch(seed=1 + self.rank))

        self.assertEqual(result, expected.detach(), msg=f"loss of rank {self.rank}")
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 0, "atol": 2e-7}
        for (name, param), ddp_param, old in zip(
            model.named_parameters(), reference.module.parameters(), before, strict=True
        ):
            whole = param.redistribute(placements=[Replicate()]).to_local()
            self.assertEqual(whole, ddp_param.detach(), **tolerance, msg=f"{name} on rank {self.rank}, {style}")
            self.assertNotEqual(whole, old, msg=f"{name} was not updated")

    SGD = (
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    )

    @with_comms
    def test_replicate_sgd(self):
        for make_optimizer in self.SGD:
            self._check("replicate", make_optimizer)

    @with_comms
    def test_fully_shard_sgd(self):
        for make_optimizer in self.SGD:
            self._check("fully_shard", make_optimizer)

    @with_comms
    def test_replicate_adam_fused(self):
        self._check("replicate", lambda params: torch.optim.Adam(params, lr=0.1, fused=True))

    @with_comms
    def test_fully_shard_adam_fused(self):
        # The fused kernel rounds the end of a tensor differently from its middle, and shards have other ends.
        self._check("fully_shard", lambda params: torch.optim.Adam(params, lr=0.1, fused=True), exact=False)

    @with_comms
    def test_data_parallel_batch_dim_analysis(self):
        # PyTorch's program: the output is flattened, and new tensors have its size.
        class WrapperModule(nn.Module):
            """Adds a tenth of the flattened output to it, and tensors that have no batch dim of their own."""

            def __init__(self):
                super().__init__()
                self.mlp = SimpleMLP()

            def forward(self, x):
                out = self.mlp(x)
                flat = out.clone().view(-1)
                out = (flat + 0.1 * flat).view(out.shape)
                size = {"device": out.device, "dtype": out.dtype}
                weights = torch.arange(out.shape[1], **size) + torch.ones(out.shape, **size)
                return weights * out + torch.zeros(out.shape[1], **size).repeat(out.shape[0], 1)

        for style in ("replicate", "fully_shard"):
            # The loss is a large sum: with 0.1, the first step would leave no gradient for the second.
            self._check(style, lambda params: torch.optim.SGD(params, lr=1e-3), model=WrapperModule)

    @with_comms
    def test_data_parallel_folded_batch_dim(self):
        # Views that fold the batch into another dim and back, and new tensors of the batch's size, refer to the rank's
        # own batch, not to the batch of all ranks.
        class WrapperModule(nn.Module):
            """Adds a dim to the batch and removes it again, before and after the network."""

            def __init__(self):
                super().__init__()
                self.mlp = SimpleMLP()

            def forward(self, x):
                return self.mlp(x.unsqueeze(0).squeeze(0)).unsqueeze(0).squeeze()

        def step(model, optim, train_batch):
            optim.zero_grad()
            inputs, labels = train_batch
            out = model(inputs)
            folded = out.view(-1, 2).view(out.shape)
            flat = folded.flatten().view(inputs.shape[0], -1)
            weights = torch.arange(inputs.shape[0], device=inputs.device, dtype=inputs.dtype)
            ones = torch.ones(8, device=inputs.device).repeat(inputs.shape[0], 1)
            fresh = torch.zeros(out.shape[0], 8, device=inputs.device) + ones
            loss = ((flat - labels) * weights.unsqueeze(-1) * fresh).mean() + out.new_ones(out.shape).sum()
            loss.backward()
            optim.step()
            return loss

        for style in ("replicate", "fully_shard"):
            self._check(style, lambda params: torch.optim.SGD(params, lr=0.1), model=WrapperModule, step=step)

    @with_comms
    def test_fully_shard_non_0_batch_dim(self):
        class WrapperModule(nn.Module):
            """Takes and returns batches along dim 1."""

            def __init__(self):
                super().__init__()
                self.mlp = SimpleMLP()

            def forward(self, x):
                return self.mlp(x.t().contiguous()).t()

        def batch(seed):
            return tuple(t.t().contiguous() for t in self._batch(seed))

        make = lambda params: torch.optim.Adam(params, lr=0.1, fused=True)  # noqa: E731
        self._check("fully_shard", make, model=WrapperModule, batch=batch, exact=False, input_batch_dim=1)


if __name__ == "__main__":
    run_tests()
