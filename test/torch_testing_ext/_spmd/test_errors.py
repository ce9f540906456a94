"""Refused steps, models and inputs: each error names the problem, the line and a remedy, and changes nothing."""

from __future__ import annotations

import copy
import functools
import inspect

import torch
import torch.distributed as dist
from spmd_training import MLP, capture, normal_batch, step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

mlp = functools.partial(MLP, (10, 8, 4))
STYLES = parametrize("style", ["replicate", "fully_shard"])


def finish(optimizer, loss):
    loss.backward()
    optimizer.step()
    return loss


def branching_step(model, optimizer, batch):
    loss = model(batch[0]).sum()
    if loss > 0:  # THE LINE
        loss = loss * 2
    return finish(optimizer, loss)


def dropout_checkpoint_step(model, optimizer, batch):
    def forward(x):
        return torch.dropout(model(x), 0.5, train=True)  # THE LINE

    return finish(optimizer, checkpoint(forward, batch[0], use_reentrant=False).sum())


def double_backward_step(model, optimizer, batch):
    loss = model(batch[0]).pow(2).sum()
    loss.backward(create_graph=True)
    return finish(optimizer, sum(p.grad.pow(2).sum() for p in model.parameters()))


def diverging_write_step(model, optimizer, batch):
    loss = finish(optimizer, model(batch[0]).sum())
    with torch.no_grad():
        model.layers[0].weight.mul_(1 + batch[0].mean())  # THE LINE
    return loss


def noise_step(model, optimizer, batch):
    loss = finish(optimizer, model(batch[0]).sum())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))  # THE LINE
    return loss


def own_gradients_step(model, optimizer, batch):
    """DDP does not average the results of autograd.grad."""
    loss = model(batch[0]).sum()
    for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.grad = grad
    optimizer.step()  # THE LINE
    return loss


def scaled_gradients_step(model, optimizer, batch):
    loss = model(batch[0]).sum()
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(batch[1].mean())  # THE LINE
    optimizer.step()
    return loss


def scheduling_step(model, optimizer, batch):
    loss = finish(optimizer, model(batch[0]).sum())
    optimizer.param_groups[0]["weight_decay"] = 0.1
    return loss


def seeding_step(model, optimizer, batch):
    torch.manual_seed(3)
    return finish(optimizer, model(batch[0] + torch.randn_like(batch[0])).sum())


def remembering_step(model, optimizer, batch):
    loss = finish(optimizer, model(batch[0]).sum())
    model.last_loss = loss
    return loss


def counting_step(model, optimizer, batch):
    model.calls = getattr(model, "calls", 0) + 1
    return finish(optimizer, model(batch[0]).sum())


def rebinding_step(model, optimizer, batch):
    loss = finish(optimizer, model(batch[0]).sum())
    model.layers[0].bias = nn.Parameter(torch.zeros(8))
    return loss


class CountingSGD(torch.optim.SGD):
    """Counts its steps in Python, as torch's optimizers no longer do."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
        return loss


STEPS = {
    "branching": (branching_step, "data-dependent control flow", "torch.where"),
    "dropout_checkpoint": (dropout_checkpoint_step, "random numbers", "checkpointed regions"),
    "double_backward": (double_backward_step, "create_graph", "gradient penalties"),
    "diverging_write": (diverging_write_step, "differ between ranks", "Average them over ranks"),
    "noise": (noise_step, "to the parameter layers.0.weight", "Average them over ranks"),
    "own_gradients": (own_gradients_step, "differ between ranks", "not those of torch.autograd.grad"),
    "scaled_gradients": (scaled_gradients_step, "to the gradient of layers.0.weight", "Average them over ranks"),
    "scheduling": (scheduling_step, "changes weight_decay in SGD.param_groups", "scheduler"),
    "seeding": (seeding_step, "random generator", "Seed outside"),
    "remembering": (remembering_step, "last_loss", "Return the value"),
    "counting": (counting_step, "calls", "buffer"),
    "rebinding": (rebinding_step, "layers.0.bias", "in place"),
}


def snapshot(model, optimizer):
    """Everything that an error must not change: objects by identity, tensors also by value."""
    named = [*model.named_parameters(), *model.named_buffers()]
    values = [(name, id(value), value.detach().clone(), value.grad) for name, value in named]
    groups = [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]
    states = [(id(key), {k: copy.deepcopy(v) for k, v in value.items()}) for key, value in optimizer.state.items()]
    attributes = [
        (name, sorted(module.__dict__), type(module), module.training) for name, module in model.named_modules()
    ]
    return values, groups, states, attributes


class TestErrors(DTensorTestBase):
    """Errors of the compiler, and the state of model and optimizer after them."""

    @property
    def world_size(self):
        return 2

    def _model(self, **options):
        torch.manual_seed(self.rank)
        model = mlp().to(self.device_type)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)

    def _batch(self):
        x, y = normal_batch(6, 10)(self.rank, 0)
        return x.to(self.device_type), y.to(self.device_type)

    def _refused(self, compiled, model, optimizer, *fragments, batch=None):
        before = snapshot(model, optimizer)
        with self.assertRaises(SPMDError) as caught:
            compiled(model, optimizer, batch if batch is not None else self._batch())
        for fragment in fragments:
            self.assertIn(fragment, str(caught.exception))
        self.assertEqual(before, snapshot(model, optimizer), msg=f"after: {caught.exception}")
        return caught.exception

    @STYLES
    @parametrize("name", list(STEPS))
    @with_comms
    def test_step(self, name, style):
        function, problem, remedy = STEPS[name]
        model, optimizer = self._model(momentum=0.9)
        step(model, optimizer, self._batch())  # creates states and gradients, which must not change
        compiled = capture(parallel_mode=DataParallel(style))(function)
        error = self._refused(compiled, model, optimizer, problem, remedy)
        if "# THE LINE" in inspect.getsource(function):
            self.assertIn("THE LINE", error.where)
            self.assertIn(__file__, error.where)
        # The model is intact: another step compiles and runs.
        capture(parallel_mode=DataParallel(style))(step)(model, optimizer, self._batch())

    @with_comms
    def test_modules(self):
        compiled = capture()(step)
        model, optimizer = self._model()
        self._refused(compiled, DistributedDataParallel(model), optimizer, "DistributedDataParallel", "plain module")
        self._refused(compiled, torch.compile(model), optimizer, "torch.compile", "plain module")
        sharded = fully_shard(mlp().to(self.device_type))
        with self.assertRaisesRegex(SPMDError, "sharded by FSDP"):
            compiled(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), self._batch())
        with self.assertRaisesRegex(SPMDError, "without a module"):
            capture()(lambda optimizer, batch: step(model, optimizer, batch))(optimizer, self._batch())

        foreign = nn.Parameter(torch.zeros(3, device=self.device_type))
        theirs = torch.optim.SGD([*model.parameters(), foreign], lr=0.1)
        self._refused(compiled, model, theirs, "number 4 of group 0", "(3,)", "leave the parameter out")

        other = mlp().to(self.device_type)

        def capturing(model, optimizer, batch):
            return finish(optimizer, (model(batch[0]) + other(batch[0])).sum())  # THE LINE

        for style in ("replicate", "fully_shard"):
            error = self._refused(
                capture(parallel_mode=DataParallel(style))(capturing), model, optimizer, "captured", "Pass the module"
            )
            self.assertTrue(error.where)

        hooked, hooked_optimizer = self._model()
        next(hooked.parameters()).register_hook(lambda grad: grad * 2)
        self._refused(compiled, hooked, hooked_optimizer, "gradient hook", "between backward() and optimizer.step()")

    @with_comms
    def test_counting_optimizer(self):
        model, _ = self._model()
        optimizer = CountingSGD(model.parameters(), lr=0.1)
        step(model, optimizer, self._batch())
        self._refused(capture()(step), model, optimizer, "'calls'", "changes in each step", "0-d tensor")

    @with_comms
    def test_inputs(self):
        model, optimizer = self._model()
        x, y = self._batch()
        compiled = capture(parallel_mode=DataParallel(input_batch_dim=2))(step)
        self._refused(compiled, model, optimizer, "input_batch_dim is 2", "(6, 10)")
        self._refused(capture()(step), model, optimizer, "requires a gradient", batch=(x.requires_grad_(), y))

    @with_comms
    def test_ranks_that_differ(self):
        torch.manual_seed(0)
        model = MLP((10, 8 + self.rank, 4)).to(self.device_type)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._refused(capture()(step), model, optimizer, "differ in their parameters", "(8, 10)", "(9, 10)", "Rank 1")

        # If one rank fails, the others raise an error instead of waiting.
        model, optimizer = self._model()
        x, y = self._batch()
        compiled = capture()(step if self.rank == 0 else branching_step)
        problem = "data-dependent" if self.rank == 1 else "Rank 1 could not compile the step"
        self._refused(compiled, model, optimizer, problem, batch=(x, y))

        # An error in user code is raised unchanged.
        before = snapshot(model, optimizer)
        with self.assertRaisesRegex(RuntimeError, "reduction dim|shape|size"):
            capture()(step)(model, optimizer, (x[:, :3], y))
        self.assertEqual(before, snapshot(model, optimizer))

    @with_comms
    def test_other_style_after_distribution(self):
        model, optimizer = self._model()
        capture(parallel_mode=DataParallel("fully_shard"))(step)(model, optimizer, self._batch())
        self._refused(capture()(step), model, optimizer, "already distributed", "parallel_style")
        capture(parallel_mode=DataParallel("default"))(step)(model, optimizer, self._batch())

    @with_comms
    def test_no_process_group(self):
        dist.destroy_process_group()
        model, optimizer = self._model()
        self._refused(capture()(step), model, optimizer, "no process group", "init_process_group")
        for make, message in (
            (lambda: DataParallel("zero"), "Unknown parallel_style 'zero'"),
            (lambda: DataParallel(input_batch_dim=-1), "input_batch_dim is -1"),
            (lambda: DataParallel(bucket_mb=0), "bucket_mb is 0"),
            (lambda: capture(backend="jit"), "Unknown backend 'jit'"),
            (lambda: capture(parallel_mode="replicate"), "parallel_mode is 'replicate'"),
        ):
            with self.assertRaisesRegex(SPMDError, message):
                make()
        with self.assertRaisesRegex(SPMDError, "has not been called"):
            capture()(step).report()


instantiate_parametrized_tests(TestErrors)

if __name__ == "__main__":
    run_tests()
