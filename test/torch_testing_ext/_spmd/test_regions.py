"""Regions: the engine with forward and optimizers compiled trains like DDP; what cannot be compiled stays eager."""

from __future__ import annotations

import functools
import os

import pytest

# Compile on one thread in the rank itself, without a pool of workers that could outlive it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from spmd_training import MLP, Case, normal_batch, step, train_both

from torch_testing_ext._spmd import compiling
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms


def penalized_step(model, optimizer, batch):
    optimizer.zero_grad()
    x = batch[0].clone().requires_grad_()
    loss = (model(x) - batch[1]).pow(2).mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.pow(2).sum()).backward()
    optimizer.step()
    return loss.detach()


class TestRegions(DTensorTestBase):
    """Steps with compiled regions, against DDP on two ranks."""

    @property
    def world_size(self):
        return 2

    @pytest.mark.slow
    @parametrize("style", ["replicate", "fully_shard"])
    @with_comms
    def test_trains_as_ddp(self, style):
        make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        model = functools.partial(MLP, (10, 7, 4))
        case = Case("regions", model, normal_batch(12, 10), lambda params: make(params), tolerance=2e-6)
        compiled = train_both(self, case, compile(parallel_mode=DataParallel(style), backend="inductor"))
        self.assertIn("forward and optimizers are compiled, verified 1 times", str(compiled.report()))

    @with_comms
    def test_create_graph_stays_eager(self):
        model = functools.partial(MLP, (10, 7, 4))
        case = Case("penalty", model, normal_batch(12, 10), step=penalized_step, tolerance=2e-6)
        compiled = train_both(self, case, compile(backend="inductor"))
        self.assertIn("are eager: the step differentiates through gradients", str(compiled.report()))

    @pytest.mark.slow
    @with_comms
    def test_a_compiled_function_as_step(self):
        case = Case("compiled", functools.partial(MLP, (10, 7, 4)), normal_batch(12, 10), tolerance=2e-6)
        mode = DataParallel("fully_shard")
        train_both(self, case, lambda function: compile(parallel_mode=mode)(torch.compile(function, backend="eager")))

    @with_comms
    def test_a_wrong_region_is_found_and_undone(self):
        torch.manual_seed(self.rank)
        model = MLP((10, 7, 4)).to(self.device_type)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = compile(backend="inductor")(step)
        batch = [part.to(self.device_type) for part in normal_batch(12, 10)(self.rank, 0)]
        compiled(model, optimizer, batch)
        before = [param.clone() for param in model.parameters()]
        plain, compiling.torch.compile = torch.compile, lambda method: lambda *args: _half(method(*args))
        try:
            with self.assertRaisesRegex(SPMDError, "not equivalent to the engine"):
                compiled(model, optimizer, batch)
        finally:
            compiling.torch.compile = plain
        self.assertEqual(before, list(model.parameters()), rtol=0, atol=0)
        self.assertNotIn("forward", vars(model))


def _half(value):
    return value if value is None else value / 2


instantiate_parametrized_tests(TestRegions)

if __name__ == "__main__":
    run_tests()
