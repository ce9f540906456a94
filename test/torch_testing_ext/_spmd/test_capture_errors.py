"""Steps, models and arguments that cannot be captured: each error names a remedy, and changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from spmd_training import MLP, Case, capture, normal_batch, step, to_device, train_both
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

mlp = functools.partial(MLP, (10, 8, 4))
STYLES = parametrize("style", ["replicate", "fully_shard"])
ENGINE = 'Drop backend="capture"'


def finish(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train(model, optimizer, batch):
    return finish(optimizer, (model(batch[0]) - batch[1]).pow(2).mean())


class Subclass(torch.Tensor):
    """A tensor of a class of its own."""


@dataclasses.dataclass
class Output:
    loss: Any


class CountingSGD(torch.optim.SGD):
    """Counts its steps in Python, as torch's optimizers no longer do."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
        return loss


# -- what cannot be recorded


def branching(model, optimizer, batch):
    loss = model(batch[0]).sum()
    return finish(optimizer, loss * 2 if loss > 0 else loss)  # THE LINE


def double_backward(model, optimizer, batch):
    model(batch[0]).pow(2).sum().backward(create_graph=True)
    return finish(optimizer, sum(p.grad.pow(2).sum() for p in model.parameters()))


def reducing(model, optimizer, batch):
    loss = train(model, optimizer, batch).detach()
    dist.all_reduce(loss)  # THE LINE
    return loss


def gathering(model, optimizer, batch):
    loss = train(model, optimizer, batch).detach()
    found = [torch.empty_like(loss) for _ in range(2)]
    dist.all_gather(found, loss)  # THE LINE
    return found


def as_array(model, optimizer, batch):
    return train(model, optimizer, batch).detach().numpy()


def as_number(model, optimizer, batch):
    return finish(optimizer, model(batch[0]).sum() * float(batch[1].mean()))


def returning_a_record(model, optimizer, batch):
    return Output(train(model, optimizer, batch))


KEPT = []


def keeping_a_result(model, optimizer, batch):
    KEPT[:] = [train(model, optimizer, batch)]


NOT_RECORDED = {
    "keeping": (keeping_a_result, "keeps a tensor"),
    "branching": (branching, "cannot be recorded: GuardOnDataDependent"),
    "double_backward": (double_backward, "create_graph"),
    "reducing": (reducing, "_functional_collectives"),
    "gathering": (gathering, "_functional_collectives"),
    "number": (as_number, "cannot be recorded"),
    "array": (as_array, "cannot be recorded|object of type ndarray"),
    "record": (returning_a_record, "object of type Output"),
}


# -- what is recorded, but not repeated as Python would


def scheduling(model, optimizer, batch):
    loss = train(model, optimizer, batch)
    optimizer.param_groups[0]["weight_decay"] += 0.1
    return loss


def freezing(model, optimizer, batch):
    loss = train(model, optimizer, batch)
    model.layers[0].requires_grad_(not model.layers[0].weight.requires_grad)
    return loss


def dropping_in_a_checkpoint(model, optimizer, batch):
    def forward(x):
        return torch.dropout(model(x), 0.5, train=True)

    return finish(optimizer, checkpoint(forward, batch[0], use_reentrant=False).sum())


def counting(model, optimizer, batch):
    model.scale = getattr(model, "scale", 1) + 1
    return finish(optimizer, model(batch[0]).sum() * model.scale)


def seeding(model, optimizer, batch):
    torch.manual_seed(3)
    return train(model, optimizer, (batch[0] + torch.randn_like(batch[0]), batch[1]))


def leaving_in_eval(model, optimizer, batch):
    loss = train(model, optimizer, batch)
    model.train(not model.training)
    return loss


def replacing_a_buffer(model, optimizer, batch):
    loss = train(model, optimizer, batch)
    model.register_buffer("last", batch[0].mean())
    return loss


NOT_REPEATED = {
    each.__name__: each
    for each in (
        scheduling,
        freezing,
        dropping_in_a_checkpoint,
        counting,
        seeding,
        leaving_in_eval,
        replacing_a_buffer,
    )
}


class TestCaptureErrors(DTensorContinuousTestBase):
    """Refusals, and the state after them."""

    @property
    def world_size(self):
        return 2

    def _model(self, optimizer=torch.optim.SGD, **options):
        torch.manual_seed(self.rank)
        model = mlp().to(self.device_type)
        return model, optimizer(model.parameters(), **{"lr": 0.1, **options})

    def _batch(self):
        return tuple(part.to(self.device_type) for part in normal_batch(6, 10)(self.rank, 0))

    def _refused(self, compiled, model, optimizer, problem, remedy=ENGINE, batch=None):
        before = self._state(model, optimizer)
        with self.assertRaisesRegex(SPMDError, problem) as caught:
            compiled(model, optimizer, batch or self._batch())
        self.assertIn(remedy, str(caught.exception))
        self.assertEqual(before, self._state(model, optimizer), msg=f"after: {caught.exception}")
        return caught.exception

    def _state(self, model, optimizer):
        """Everything that an error must not change: objects by identity, tensors also by value."""
        named = [*model.named_parameters(), *model.named_buffers()]
        values = [(name, id(value), value.detach().clone(), value.grad) for name, value in named]
        groups = [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]
        states = [(id(key), {k: copy.deepcopy(v) for k, v in value.items()}) for key, value in optimizer.state.items()]
        return values, groups, states, [module.training for module in model.modules()], torch.get_rng_state()

    @STYLES
    @parametrize("name", [*NOT_RECORDED])
    def test_not_recorded(self, name, style):
        function, problem = NOT_RECORDED[name]
        model, optimizer = self._model(momentum=0.9)
        step(model, optimizer, self._batch())  # makes states and gradients, which must not change
        compiled = capture(parallel_mode=DataParallel(style))(function)
        error = self._refused(compiled, model, optimizer, problem)
        if name in ("branching", "reducing", "gathering"):
            self.assertIn("THE LINE", error.where)
        # The model is intact: the same step runs in the engine.
        if name != "array":
            compile(parallel_mode=DataParallel(style))(function)(model, optimizer, self._batch())

    @STYLES
    @parametrize("name", [*NOT_REPEATED])
    def test_not_repeated(self, name, style):
        model, optimizer = self._model()
        compiled = capture(parallel_mode=DataParallel(style))(NOT_REPEATED[name])
        self._refused(compiled, model, optimizer, "not equivalent to the engine", "drop backend=")
        compile(parallel_mode=DataParallel(style))(NOT_REPEATED[name])(model, optimizer, self._batch())

    @parametrize("post", [False, True])
    def test_hooks_of_later_calls(self, post):
        def negate(param):
            param.grad = -param.grad

        model, optimizer = self._model()
        first = next(model.parameters())
        first.register_hook(lambda gradient: None)
        compiled = capture()(step)
        for _ in range(2):  # without gradients, and with them
            compiled(model, optimizer, self._batch())
        first.register_post_accumulate_grad_hook(negate) if post else first.register_hook(torch.neg)
        self._refused(compiled, model, optimizer, "not equivalent to the engine", "drop backend=")

    @STYLES
    @parametrize("optimizer", [torch.optim.RAdam, torch.optim.ASGD])
    def test_optimizers_that_branch_on_values(self, optimizer, style):
        model, optimizer = self._model(optimizer)
        step(model, optimizer, self._batch())
        self._refused(capture(parallel_mode=DataParallel(style))(step), model, optimizer, "cannot be recorded")

    def test_optimizer_that_counts(self):
        model, optimizer = self._model(CountingSGD)
        step(model, optimizer, self._batch())
        self._refused(capture()(step), model, optimizer, r"state\['calls'\] of layers.0.bias is 1", "drop backend=")

    def test_tensors_of_no_module(self):
        model, optimizer = self._model()
        held = [nn.Parameter(torch.zeros(4, device=self.device_type))]
        hidden = {"deep": {"er": {"and": {"deeper": held}}}}

        def using(model, optimizer, batch):
            return train(lambda x: model(x) + hidden["deep"]["er"]["and"]["deeper"][0], optimizer, batch)

        self._refused(capture()(using), model, optimizer, "that no module holds")

    @STYLES
    def test_sparse_gradients(self, style):
        model = nn.Sequential(nn.Embedding(12, 4, sparse=True)).to(self.device_type)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.arange(6, device=self.device_type), self._batch()[1]
        self._refused(capture(parallel_mode=DataParallel(style))(train), model, optimizer, "sparse", batch=batch)

    def test_arguments(self):
        model, optimizer = self._model()
        x, y = self._batch()
        for odd in (x.clone().requires_grad_(), x.to_sparse(), x.as_subclass(Subclass)):
            self._refused(capture()(step), model, optimizer, "cannot take an argument", "plain tensors", (odd, y))

    def test_modules(self):
        model, optimizer = self._model()
        wrapped = DistributedDataParallel(model)
        self._refused(capture()(step), wrapped, optimizer, "DistributedDataParallel", "plain module")

    def test_without_gradients(self):
        model, optimizer = self._model()
        with torch.no_grad():
            self._refused(capture()(step), model, optimizer, "cannot be recorded", "outside of no_grad")

    def test_errors_of_the_user_are_unchanged(self):
        def raising(model, optimizer, batch):
            raise KeyError("mine")

        model, optimizer = self._model()
        before = self._state(model, optimizer)
        with self.assertRaisesRegex(KeyError, "mine"):
            capture()(raising)(model, optimizer, self._batch())
        self.assertEqual(before, self._state(model, optimizer))

    def test_ranks_that_differ(self):
        torch.manual_seed(0)
        model = MLP((10, 8 + self.rank, 4)).to(self.device_type)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._refused(capture()(step), model, optimizer, "differ in their parameters", "Build the same model")
        model, optimizer = self._model()
        problem = "cannot be recorded" if self.rank else "Rank 1 refused the step"
        remedy = ENGINE if self.rank else "has not updated anything"
        self._refused(capture()(branching if self.rank else step), model, optimizer, problem, remedy)

    def test_another_style(self):
        model, optimizer = self._model()
        capture(parallel_mode=DataParallel("fully_shard"))(step)(model, optimizer, self._batch())
        self._refused(capture()(step), model, optimizer, "already distributed", "parallel_style")
        capture(parallel_mode=DataParallel("default"))(step)(model, optimizer, self._batch())

    def test_too_many_programs(self):
        def scaled(model, optimizer, batch, scale):
            return finish(optimizer, model(batch[0]).sum() * scale)

        model, optimizer = self._model()
        compiled, batch = capture(verify="off")(scaled), self._batch()
        compiled.most_programs = 5
        with self.assertRaisesRegex(SPMDError, "change from call to call"):
            for number in range(10):
                compiled(model, optimizer, batch, float(number))
        self.assertEqual(compiled.recordings, 5)


class TestOptions(TestCase):
    """Options that do not exist."""

    def test_options(self):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with self.assertRaisesRegex(SPMDError, "no process group"):
            capture()(step)(model, optimizer, normal_batch(6, 10)(0, 0))
        for make, message in (
            (lambda: DataParallel("zero"), "Unknown parallel_style 'zero'"),
            (lambda: DataParallel(input_batch_dim=-1), "input_batch_dim is -1"),
            (lambda: DataParallel(bucket_mb=0), "bucket_mb is 0"),
            (lambda: capture(backend="jit"), "Unknown backend 'jit'"),
            (lambda: capture(parallel_mode="replicate"), "parallel_mode is 'replicate'"),
        ):
            with self.assertRaisesRegex(SPMDError, message):
                make()


# -- what is captured


def functional(model, optimizer, batch):
    """Functional collectives, in the loss and in what is written to a parameter."""
    group = dist.group.WORLD
    scale = funcol.all_reduce(batch[0].pow(2).mean(), "avg", group)
    loss = train(model, optimizer, (batch[0] / scale, batch[1]))
    with torch.no_grad():
        next(model.parameters()).mul_(1 - 0.1 * scale)
    return loss, funcol.all_gather_tensor(loss.detach().view(1), 0, group)


class Trainer:
    """A step that is a method, and finds model and optimizer in attributes."""

    def __init__(self, decorate, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.run = decorate(self._run)

    def _run(self, batch):
        return train(self.model, self.optimizer, batch)


class TestCaptured(DTensorContinuousTestBase):
    """Steps that are right, against DDP on two ranks."""

    @property
    def world_size(self):
        return 2

    def test_metric(self):
        metric = nn.BatchNorm1d(1, affine=False)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def counting(batch):
            metric.num_batches_tracked += len(batch[0])
            return train(model, optimizer, batch)

        compiled = capture()(counting)
        for call in range(3):
            compiled(normal_batch(6 + self.rank, 10)(self.rank, call))
        self.assertEqual(metric.num_batches_tracked.item(), 3 * (6 + self.rank))

    @STYLES
    def test_functional_collectives(self, style):
        case = Case("functional", mlp, normal_batch(6, 10), step=functional, tolerance=1e-6)
        train_both(self, case, capture(parallel_mode=DataParallel(style)))

    @STYLES
    def test_captured_tensors(self, style):
        def averaging(decorate):
            mean = torch.zeros(8, device=self.device_type)

            def averaging(model, optimizer, batch):
                loss = train(model, optimizer, batch)
                with torch.no_grad():
                    bias = next(p for p in model.parameters() if p.dim() == 1)
                    mean.mul_(0.9).add_(bias, alpha=0.1)
                return loss, mean * 1

            return averaging

        steps = averaging(None), averaging(None)
        case = Case("average", mlp, normal_batch(6, 10), step=steps[0], tolerance=1e-6)
        train_both(self, case, lambda _: capture(parallel_mode=DataParallel(style))(steps[1]))

    @STYLES
    def test_model_in_attributes_and_lists(self, style):
        torch.manual_seed(0)
        model, other = mlp().to(self.device_type), mlp().to(self.device_type)
        other.load_state_dict(model.state_dict())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other)]
        held = list(model.parameters())

        def with_list(decorate, model, optimizer, held):
            def run(batch):
                loss = (model(batch[0]) - batch[1]).pow(2).mean() + sum(p.pow(2).sum() for p in held)
                return finish(optimizer, loss)

            return decorate(run)

        decorate = capture(parallel_mode=DataParallel(style))
        mine = Trainer(decorate, model, optimizers[0]).run
        theirs = Trainer(compile(parallel_mode=DataParallel(style)), other, optimizers[1]).run
        lists = (
            with_list(decorate, model, optimizers[0], held),
            with_list(compile(parallel_mode=DataParallel(style)), other, optimizers[1], list(other.parameters())),
        )
        for call in range(3):
            batch = to_device(normal_batch(6, 10)(self.rank, call), self.device_type)
            self.assertEqual(mine(batch), theirs(batch).detach())
            self.assertEqual(lists[0](batch), lists[1](batch).detach())

    def test_dropped_gradients_count(self):
        """Whether a gradient exists on entry distinguishes programs."""

        def looking(model, optimizer, batch):
            scale = 1 + sum(p.grad is not None for p in model.parameters())
            return finish(optimizer, (model(batch[0]) - batch[1]).pow(2).mean() * scale)

        case = Case("looking", mlp, normal_batch(6, 10), step=looking)
        compiled = train_both(self, case, capture())
        self.assertEqual(compiled.recordings, 2)


instantiate_parametrized_tests(TestCaptureErrors)
instantiate_parametrized_tests(TestCaptured)

if __name__ == "__main__":
    run_tests()
