# Owner(s): ["oncall: distributed"]
"""A compiled train step has the same result as a step under DistributedDataParallel.

PyTorch removed `torch.distributed._spmd` in 2.5, and had disabled this suite before.
Unlike there, every rank starts with its own weights, and in the compared step it has
its own data: both DDP and the compiled step must take rank 0's weights and optimizer
states, and average the gradients.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.distributed._spmd.api import compile
from torch_testing_ext.distributed._spmd.parallel_mode import DataParallel
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms


class SimpleMLP(nn.Module):
    """Two linear layers."""

    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(50, 32)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(32, 8)

    def forward(self, x):
        return torch.sigmoid(self.net2(self.relu(self.net1(x))))

    def reset_parameters(self, *args, **kwargs):
        for layer in (self.net1, self.net2):
            layer.reset_parameters()


def train_step(model, optim, train_batch):
    def loss_fn(out, labels):
        return (out - labels).sum()

    optim.zero_grad()
    inputs, labels = train_batch
    loss = loss_fn(model(inputs), labels)
    loss.backward()
    optim.step()
    return loss


class TestDataParallel(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    def _test_data_parallel(
        self,
        mod,
        ddp_mod,
        opt,
        ddp_opt,
        inp,
        train_step,
        data_parallel_mode,
        data_parallel_options=None,
        exact=True,
    ):
        # One eager step creates the optimizers' states. Nothing reduces the gradients of
        # `mod` there, so all ranks share rank 0's data.
        shared_inp = deepcopy(inp)
        for tensor in shared_inp:
            dist.broadcast(tensor, src=0)
        train_step(ddp_mod, ddp_opt, shared_inp)
        train_step(mod, opt, shared_inp)
        before = [param.detach().clone() for param in mod.parameters()]

        expected = train_step(ddp_mod, ddp_opt, inp)
        compiled_fn = compile(parallel_mode=DataParallel(data_parallel_mode, **(data_parallel_options or {})))(
            train_step
        )
        loss = compiled_fn(mod, opt, inp)

        self.assertEqual(loss, expected.detach(), msg=f"loss of rank {self.rank}")
        tolerance = {"rtol": 0, "atol": 0 if exact else 2e-7}
        for (name, param), p2, old in zip(mod.named_parameters(), ddp_mod.module.parameters(), before, strict=True):
            p1 = param.redistribute(placements=[Replicate()]).to_local()
            where = f"{name} on rank {self.rank}, {data_parallel_mode}"
            self.assertEqual(p1, p2.detach(), **tolerance, msg=where)
            self.assertNotEqual(p1, old, msg=f"{name} was not updated")

    @with_comms
    def test_replicate_sgd(self):
        for config in self._sgd_configs():
            mod, ddp_mod = self._models(SimpleMLP)
            opt = torch.optim.SGD(mod.parameters(), **config)
            ddp_opt = torch.optim.SGD(ddp_mod.parameters(), **config)
            self._test_data_parallel(mod, ddp_mod, opt, ddp_opt, self._train_batch(), train_step, "replicate")

    @with_comms
    def test_replicate_adam_fused(self):
        mod, ddp_mod = self._models(SimpleMLP)
        opt = torch.optim.Adam(mod.parameters(), lr=0.1, fused=True)
        ddp_opt = torch.optim.Adam(ddp_mod.parameters(), lr=0.1, fused=True)
        self._test_data_parallel(mod, ddp_mod, opt, ddp_opt, self._train_batch(), train_step, "replicate")

    @with_comms
    def test_fully_shard_sgd(self):
        for config in self._sgd_configs():
            mod, ddp_mod = self._models(SimpleMLP)
            opt = torch.optim.SGD(mod.parameters(), **config)
            ddp_opt = torch.optim.SGD(ddp_mod.parameters(), **config)
            self._test_data_parallel(mod, ddp_mod, opt, ddp_opt, self._train_batch(), train_step, "fully_shard")

    @with_comms
    def test_fully_shard_adam_fused(self):
        mod, ddp_mod = self._models(SimpleMLP)
        opt = torch.optim.Adam(mod.parameters(), lr=0.1, fused=True)
        ddp_opt = torch.optim.Adam(ddp_mod.parameters(), lr=0.1, fused=True)
        # The fused kernel rounds the end of a tensor differently from its middle, and
        # shards have other ends.
        self._test_data_parallel(
            mod, ddp_mod, opt, ddp_opt, self._train_batch(), train_step, "fully_shard", exact=False
        )

    @with_comms
    def test_data_parallel_batch_dim_analysis(self):
        # Views that fold the batch dim away, and new tensors of the output's size.
        class WrapperModule(nn.Module):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.mlp = SimpleMLP()

            def forward(self, x):
                output = self.mlp(x)
                flat = output.clone().view(-1).squeeze().unsqueeze(0)
                output = output + 0.1 * flat.view(output.shape[0], -1)
                arange = torch.arange(output.shape[1], device=output.device)
                ones = torch.ones(output.shape, device=output.device)
                zeros = torch.zeros(output.shape[1], device=output.device)
                repeated_zeros = zeros.unsqueeze(0).repeat(output.shape[0], 1)
                return output + (arange.unsqueeze(0) + ones) + repeated_zeros

        for parallel_mode in ("replicate", "fully_shard"):
            mod, ddp_mod = self._models(WrapperModule)
            opt = torch.optim.SGD(mod.parameters(), lr=0.1)
            ddp_opt = torch.optim.SGD(ddp_mod.parameters(), lr=0.1)
            self._test_data_parallel(mod, ddp_mod, opt, ddp_opt, self._train_batch(), train_step, parallel_mode)

    @with_comms
    def test_fully_shard_non_0_batch_dim(self):
        class WrapperModule(nn.Module):
            def __init__(self):
                super().__init__()
                self.mlp = SimpleMLP()

            def forward(self, x):
                return self.mlp(x.t().contiguous()).t()

        mod, ddp_mod = self._models(WrapperModule)
        opt = torch.optim.Adam(mod.parameters(), lr=0.1, fused=True)
        ddp_opt = torch.optim.Adam(ddp_mod.parameters(), lr=0.1, fused=True)
        train_batch = tuple(each.t().contiguous() for each in self._train_batch())
        self._test_data_parallel(
            mod,
            ddp_mod,
            opt,
            ddp_opt,
            train_batch,
            train_step,
            "fully_shard",
            {"input_batch_dim": 1},
            exact=False,
        )

    # -- What PyTorch's file does not have: other weights and data in each rank

    def _sgd_configs(self):
        return [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "foreach": True}]

    def _models(self, module):
        """A model with this rank's own weights, and its copy in DDP, which takes rank 0's."""
        torch.manual_seed(self.rank)
        mod = module().to(self.device_type)
        return mod, DDP(deepcopy(mod))

    def _train_batch(self):
        generator = torch.Generator().manual_seed(1 + self.rank)
        sizes = (128, 50), (128, 8)
        return tuple(torch.randn(size, generator=generator).to(self.device_type) for size in sizes)

    @with_comms
    def test_data_parallel_folded_batch_dim(self):
        # Views that fold the batch into another dim and back, and new tensors of the
        # batch's size, refer to the rank's own batch, not to the batch of all ranks.
        class WrapperModule(nn.Module):
            """Adds a dim to the batch and removes it, before and after the network."""

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
            options = {"device": inputs.device, "dtype": inputs.dtype}
            weights = torch.arange(inputs.shape[0], **options)
            scale = torch.arange(out.shape[1], **options) + torch.ones(out.shape, **options)
            ones = torch.ones(8, **options).repeat(inputs.shape[0], 1)
            fresh = torch.zeros(out.shape[0], 8, **options) + ones * scale
            loss = ((flat - labels) * weights.unsqueeze(-1) * fresh).mean() + out.new_ones(out.shape).sum()
            loss.backward()
            optim.step()
            return loss

        for parallel_mode in ("replicate", "fully_shard"):
            mod, ddp_mod = self._models(WrapperModule)
            opt = torch.optim.SGD(mod.parameters(), lr=0.1)
            ddp_opt = torch.optim.SGD(ddp_mod.parameters(), lr=0.1)
            self._test_data_parallel(mod, ddp_mod, opt, ddp_opt, self._train_batch(), step, parallel_mode)


if __name__ == "__main__":
    run_tests()
