"""Changes between calls take effect: loaded weights, frozen layers, other batch sizes, kept or dropped gradients."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from spmd_training import (
    MLP,
    Case,
    Mixed,
    Tied,
    capture,
    compare_models,
    normal_batch,
    step,
    to_device,
    token_batch,
    train_both,
    whole,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

mlp = functools.partial(MLP, (10, 8, 4))
STYLES = parametrize("style", ["replicate", "fully_shard"])


def keeping_step(model, optimizer, batch):
    """A step that accumulates gradients from call to call."""
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


class TestBetweenCalls(DTensorTestBase):
    """Changes between calls, against DDP on two ranks."""

    @property
    def world_size(self):
        return 2

    def _pair(self, style, function=step, model=mlp, verify="first", **options):
        """A function that runs a step compiled and under DDP; the compiled step, both models and both optimizers."""
        torch.manual_seed(self.rank)
        mine = model().to(self.device_type)
        reference = copy.deepcopy(mine)
        wrapped = DistributedDataParallel(reference)
        options = {"lr": 0.1, "momentum": 0.9, **options}
        optimizers = [torch.optim.SGD(m.parameters(), **options) for m in (mine, reference)]
        compiled = capture(parallel_mode=DataParallel(style), verify=verify)(function)

        def both(i, batch=None):
            batch = to_device(batch or normal_batch(6, 10)(self.rank, i), self.device_type)
            compiled(mine, optimizers[0], batch)
            function(wrapped, optimizers[1], batch)
            compare_models(self, case, i, mine, reference)

        case = Case(f"{style} {function.__name__}", model, normal_batch(6, 10), tolerance=1e-6)
        return both, compiled, mine, reference, optimizers

    @pytest.mark.slow
    @STYLES
    @with_comms
    def test_batch_sizes(self, style):
        both, compiled, *_ = self._pair(style)
        both(0)
        both(1)
        self.assertEqual(compiled.recordings, 2)  # without states, and with them
        for i, size in enumerate((7, 3 + self.rank, 6, 7, 1), start=2):
            both(i, normal_batch(size, 10)(self.rank, i))
        self.assertEqual(compiled.recordings, 5)  # a program for each size

    @STYLES
    @with_comms
    def test_fused_optimizers_of_the_same_parameters(self, style):
        def function(model, first, second, batch):
            x, y = batch
            first.zero_grad()
            (model(x) - y).pow(2).mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.5, 0.5)  # so that the optimizers get the result of an operation
            first.step()
            second.step()

        _, _, mine, reference, optimizers = self._pair(style, fused=True)
        wrapped = DistributedDataParallel(reference)
        seconds = [torch.optim.SGD(model.parameters(), lr=0.1, fused=True) for model in (mine, reference)]
        compiled = capture(parallel_mode=DataParallel(style), verify="off")(function)
        case = Case("two fused optimizers", mlp, normal_batch(6, 10), tolerance=1e-6)
        for i in range(4):
            batch = to_device(normal_batch(6, 10)(self.rank, i), self.device_type)
            compiled(mine, optimizers[0], seconds[0], batch)
            function(wrapped, optimizers[1], seconds[1], batch)
            compare_models(self, case, i, mine, reference)
            for optimizer in seconds:
                optimizer.param_groups[0]["lr"] *= 0.5

    @STYLES
    @with_comms
    def test_gradients_are_kept(self, style):
        both, _, mine, _, optimizers = self._pair(style, keeping_step)
        for i in range(3):
            both(i)
        for optimizer in optimizers:
            optimizer.zero_grad()
        both(3)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        both(4)
        kept = next(mine.parameters()).grad
        value = whole(kept).clone()
        for optimizer in optimizers:
            optimizer.zero_grad()
        both(5)
        self.assertEqual(whole(kept), value, msg="a gradient that the caller holds must not be overwritten")

    @STYLES
    @with_comms
    def test_gradients_before_the_first_call(self, style):
        both, _, mine, reference, _ = self._pair(style, keeping_step)
        for model in (mine, reference):
            generator = torch.Generator().manual_seed(self.rank)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.device)
        both(0)

    @pytest.mark.slow
    @STYLES
    @with_comms
    def test_loading_and_freezing(self, style):
        both, compiled, mine, reference, optimizers = self._pair(style)
        both(0)
        both(1)
        weights = {name: whole(value).clone() for name, value in mine.state_dict().items()}
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        both(2)
        both(3)
        placements = {name: getattr(value, "placements", None) for name, value in mine.state_dict().items()}
        mine.load_state_dict({n: _like(weights[n], v) for n, v in mine.state_dict().items()})
        reference.load_state_dict(weights)
        for optimizer, saved in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(saved)
        both(4)
        # assign=True replaces the parameters with plain tensors: they are distributed again.
        mine.load_state_dict(weights, assign=True)
        optimizers[0].param_groups[0]["params"][:] = list(mine.parameters())
        optimizers[0].state.clear()
        optimizers[1].state.clear()
        reference.load_state_dict(weights)
        both(5)
        found = {name: getattr(value, "placements", None) for name, value in mine.state_dict().items()}
        self.assertEqual(found, placements)
        for model in (mine, reference):
            model.layers[0].requires_grad_(False)
        for i in (6, 7):
            for optimizer in optimizers:
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = None
            compiled(mine, optimizers[0], to_device(normal_batch(6, 10)(self.rank, i), self.device_type))
        self.assertIsNone(mine.layers[0].weight.grad)

    @pytest.mark.slow
    @STYLES
    @with_comms
    def test_settings(self, style):
        both, compiled, _, _, optimizers = self._pair(style)
        both(0)
        both(1)
        for optimizer in optimizers:
            optimizer.param_groups[0]["weight_decay"] = 0.1  # a constant of the program: needs a new one
        both(2)
        self.assertEqual(compiled.recordings, 3)
        for optimizer in optimizers:
            optimizer.param_groups[0]["weight_decay"] = 0
        both(3)
        self.assertEqual(compiled.recordings, 3)
        with torch.autocast(self.device_type, dtype=torch.bfloat16):
            both(4)
        both(5)
        self.assertEqual(compiled.recordings, 4)
        notes = [0]
        for optimizer in optimizers:
            optimizer.param_groups[0]["notes"] = notes
        both(6)
        notes[0] = 1
        both(7)
        self.assertEqual(compiled.recordings, 6)

    @STYLES
    @with_comms
    def test_dropout_draws_new_numbers_in_each_call(self, style):
        def dropping():
            return nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.5), nn.Linear(16, 4))

        torch.manual_seed(self.rank)
        model = dropping().to(self.device_type)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        batch = to_device(normal_batch(6, 10)(self.rank, 0), self.device_type)
        compiled = capture(parallel_mode=DataParallel(style))(step)
        losses = [compiled(model, optimizer, batch) for _ in range(4)]
        self.assertEqual(len({loss.item() for loss in losses}), 4)
        torch.manual_seed(7)
        first = compiled(model, optimizer, batch)
        torch.manual_seed(7)
        self.assertEqual(compiled(model, optimizer, batch), first, rtol=0, atol=0)
        plain = dropping().to(self.device_type)
        plain.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
        torch.manual_seed(7)
        self.assertEqual(
            first, step(plain, torch.optim.SGD(plain.parameters(), lr=0.0), batch).detach(), rtol=0, atol=0
        )

    @STYLES
    @with_comms
    def test_state_after_a_call(self, style):
        both, _, mine, _, optimizers = self._pair(style, model=Mixed)
        both(0, normal_batch(6, 10, out=(1,))(self.rank, 0))
        both(1, normal_batch(6, 10, out=(1,))(self.rank, 1))
        for name, param in mine.named_parameters():
            sharded = style == "fully_shard" and param.dim() > 0
            self.assertIsInstance(param, nn.Parameter)
            self.assertEqual(isinstance(param, DTensor), sharded, msg=name)
            for value in (param, *optimizers[0].state[param].values()) if sharded else ():
                self.assertEqual(value.placements, (Shard(0),), msg=name)
                rows = -(-param.shape[0] // 2)
                mine_rows = rows if self.rank == 0 else param.shape[0] - rows
                self.assertEqual(value.to_local().shape[0], mine_rows, msg=name)
        self.assertNotIsInstance(mine.shift, DTensor)

    @STYLES
    @with_comms
    def test_tied_weights_stay_tied(self, style):
        torch.manual_seed(self.rank)
        model = Tied().to(self.device_type)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        capture(parallel_mode=DataParallel(style))(step)(
            model, optimizer, to_device(token_batch(self.rank, 0), self.device_type)
        )
        self.assertIs(model.embed.weight, model.out.weight)
        self.assertIs(optimizer.param_groups[0]["params"][0], model.embed.weight)

    @pytest.mark.slow
    @with_comms
    def test_fully_shard_as_fsdp2(self):
        torch.manual_seed(0)
        mine = MLP((10, 7, 4)).to(self.device_type)
        theirs = copy.deepcopy(mine)
        fully_shard(theirs)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (mine, theirs)]
        compiled = capture(parallel_mode=DataParallel("fully_shard"))(step)
        for i in range(3):
            batch = to_device(normal_batch(6, 10)(self.rank, i), self.device_type)
            self.assertEqual(compiled(mine, optimizers[0], batch), step(theirs, optimizers[1], batch).detach())
            for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
                self.assertEqual(p.placements, q.placements)
                self.assertEqual(p.to_local(), q.to_local(), msg=f"{name}, call {i}")

    @pytest.mark.slow
    @with_comms
    def test_two_steps_and_two_models(self):
        torch.manual_seed(self.rank)
        model, teacher = mlp().to(self.device_type), mlp().to(self.device_type)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD(model.layers[0].parameters(), lr=0.5)

        def distil(model, teacher, optimizers, x):
            for each in optimizers:
                each.zero_grad()
            with torch.no_grad():
                target = teacher(x)
            loss = (model(x) - target).pow(2).sum()
            loss.backward()
            for each in optimizers:
                each.step()
            return {"loss": loss, "target": target}

        reference, its_teacher = copy.deepcopy(model), copy.deepcopy(teacher)
        for module in (reference, its_teacher):
            for p in module.parameters():
                torch.distributed.broadcast(p.detach(), 0)
        theirs = [
            torch.optim.SGD(reference.parameters(), lr=0.1),
            torch.optim.SGD(reference.layers[0].parameters(), lr=0.5),
        ]
        wrapped = DistributedDataParallel(reference)
        compiled = capture(parallel_mode=DataParallel("fully_shard"))(distil)
        again = capture(parallel_mode=DataParallel("default"))(step)
        for i in range(2):
            batch = to_device(normal_batch(6, 10)(self.rank, i), self.device_type)
            found = compiled(model, teacher, [optimizer, other], x=batch[0])
            expected = distil(wrapped, its_teacher, theirs, batch[0])
            self.assertEqual(found["loss"], expected["loss"].detach())
            self.assertEqual(found["target"], expected["target"])
            again(model, optimizer, batch)
            step(wrapped, theirs[0], batch)
            compare_models(self, Case("two steps", mlp, step, tolerance=1e-6), i, model, reference)


def _like(value, distributed):
    """`value` distributed like `distributed`, as in the checkpoint of a distributed model."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(distributed, DTensor):
        return value
    return distribute_tensor(value, distributed.device_mesh, distributed.placements)


class TestWorldSizes(DTensorTestBase):
    """The base of tests on other numbers of ranks."""

    STYLES = ("replicate", "fully_shard")

    def _train(self):
        for style in self.STYLES:
            case = Case(
                f"{self.world_size} ranks",
                lambda: MLP((10, 7, 1)),
                normal_batch(6, 10, out=(1,)),
                tolerance=1e-6,
                iterations=2,
            )
            train_both(self, case, capture(parallel_mode=DataParallel(style)))


def _with_world_size(size):
    class Sized(TestWorldSizes):
        """Compiled steps against DDP on a given number of ranks."""

        @property
        def world_size(self):
            return size

        @with_comms
        def test_trains_as_ddp(self):
            self._train()

    Sized.__name__ = Sized.__qualname__ = f"TestWorldSize{size}"
    return Sized


TestWorldSize1, TestWorldSize3, TestWorldSize4 = map(_with_world_size, (1, 3, 4))
instantiate_parametrized_tests(TestBetweenCalls)

if __name__ == "__main__":
    run_tests()
