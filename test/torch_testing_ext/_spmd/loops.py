"""Ordinary training loops, written once, and run under DDP and by the engine.

A loop gets a `Parallel`, which wraps models (for DDP) or steps (for the engine), and returns all that is to be equal.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from torch_testing_ext.distributed._spmd import DataParallel, compile

CALLS = 4


class Parallel:
    """Eager training under DDP: wraps models."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def model(self, module: nn.Module) -> Any:
        return DistributedDataParallel(module, find_unused_parameters=True)

    def step(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return function

    def batch(self, call: int, width: int = 6, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * call + self.rank)
        rows += self.rank
        return torch.randn(rows, width, generator=generator), torch.randn(rows, 3, generator=generator)


class ByEngine(Parallel):
    """Training by the engine: wraps steps."""

    def __init__(self, rank: int, style: str) -> None:
        super().__init__(rank)
        self.style = style

    def model(self, module: nn.Module) -> Any:
        return module

    def step(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return compile(parallel_mode=DataParallel(self.style, **options))(function)


def net(*sizes: int) -> nn.Sequential:
    sizes = sizes or (6, 7, 3)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def error(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).pow(2).mean()


def update(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = error(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def state(*models: Any) -> list[torch.Tensor]:
    return [whole(p) for model in models for p in (*model.parameters(), *model.buffers())]


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).detach().clone()


LOOPS: dict[str, Callable[[Any], Any]] = {}


def loop(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    LOOPS[function.__name__] = function
    return function


def simple(step: Callable[..., Any], make: Callable[[Any], Any] = adam, build: Callable[[], nn.Module] = net) -> None:
    """Register a loop whose step takes the model, the optimizer and a batch."""

    def run(parallel: Any) -> Any:
        model = parallel.model(build())
        optimizer = make(model)
        compiled = parallel.step(step)
        results = [compiled(model, optimizer, parallel.batch(call)) for call in range(CALLS)]
        grads = [None if p.grad is None else whole(p.grad) for p in model.parameters()]
        return results, state(model), grads

    LOOPS[step.__name__] = run


# -- reads of Python's state


def importing(model, optimizer, batch):
    import decimal

    loss = update(model, optimizer, batch)
    return loss * float(decimal.Decimal(2))


def printing(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    return loss, f"{loss:.6f}", loss.item()


def looking_for_nan(model, optimizer, batch):
    optimizer.zero_grad()
    loss = error(model, batch)
    if not torch.isfinite(loss):
        return None
    loss.backward()
    if math.isfinite(float(loss)):
        optimizer.step()
    return loss


def all_reducing(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


@loop
def counter(parallel):
    model = parallel.model(net())
    optimizer, seen = adam(model), collections.Counter()

    @parallel.step
    def step(batch):
        seen["calls"] += 1
        loss = error(model, batch) * seen["calls"]
        optimizer.zero_grad()
        loss.backward()
        if seen["calls"] % 2 == 0:
            optimizer.step()
        return loss.detach()

    return [step(parallel.batch(call)) for call in range(CALLS)], state(model), seen


@loop
def attribute_that_appears(parallel):
    class Options:
        scale = 1.0

    options, model = Options(), parallel.model(net())
    optimizer = adam(model)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = error(model, batch) * options.scale
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, results = parallel.step(step), []
    for call in range(CALLS):
        if call == 2:
            options.scale = 3.0  # hides that of the class
        results.append(step(model, optimizer, parallel.batch(call)))
    return results, state(model)


@loop
def method_of_trainer(parallel):
    class Trainer:
        def __init__(self):
            self.model = parallel.model(net())
            self.optimizer = adam(self.model)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

        def train(self, batch):
            loss = update(self.model, self.optimizer, batch)
            self.scheduler.step()
            return loss

    Trainer.train = parallel.step(Trainer.train)
    trainer = Trainer()
    return [trainer.train(parallel.batch(call)) for call in range(CALLS)], state(trainer.model)


@loop
def compiled_bound_method(parallel):
    trainer = types.SimpleNamespace(model=parallel.model(net()))
    trainer.optimizer = adam(trainer.model)

    class Runner:
        def __init__(self, inner):
            self.inner = inner

        def run(self, batch):
            return update(self.inner.model, self.inner.optimizer, batch)

    step = parallel.step(Runner(trainer).run)
    return [step(parallel.batch(call)) for call in range(CALLS)], state(trainer.model)


MODEL, OPTIMIZER = None, None


def global_step(batch):
    return update(MODEL, OPTIMIZER, batch)


@loop
def globals_of_the_step(parallel):
    global MODEL, OPTIMIZER
    MODEL = parallel.model(net())
    OPTIMIZER = adam(MODEL)
    step = parallel.step(global_step)
    results = [step(parallel.batch(call)) for call in range(CALLS)], state(MODEL)
    MODEL = OPTIMIZER = None
    return results


# -- kinds of loops


@loop
def gan(parallel):
    g, d = parallel.model(net(6, 5, 3)), parallel.model(net(3, 4, 1))
    opt_g, opt_d = adam(g), adam(d)

    @parallel.step
    def step_d(batch):
        opt_d.zero_grad()
        loss = d(g(batch[0]).detach()).mean() - d(batch[1]).mean()
        loss.backward()
        opt_d.step()
        for p in d.parameters():
            p.data.clamp_(-0.2, 0.2)
        return loss.detach()

    @parallel.step
    def step_g(batch):
        opt_g.zero_grad()
        loss = -d(g(batch[0])).mean()
        loss.backward()
        opt_g.step()
        return loss.detach()

    results = []
    for call in range(CALLS):
        results.append(step_d(parallel.batch(call)))
        if call % 2:
            results.append(step_g(parallel.batch(100 + call)))
    return results, state(g, d)


@loop
def gan_in_one_step(parallel):
    g, d = parallel.model(net(6, 5, 3)), parallel.model(net(3, 4, 1))
    opt_g, opt_d = adam(g), adam(d)

    @parallel.step
    def step(batch):
        opt_d.zero_grad()
        loss_d = d(g(batch[0]).detach()).mean() - d(batch[1]).mean()
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = -d(g(batch[0])).mean()
        loss_g.backward()
        opt_g.step()
        return loss_d.detach(), loss_g.detach()

    return [step(parallel.batch(call)) for call in range(CALLS)], state(g, d)


@loop
def scaler(parallel):
    model = parallel.model(net())
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=2.0**127)

    @parallel.step
    def step(batch):
        optimizer.zero_grad()
        scaler.scale(error(model, batch)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return norm.isfinite(), scaler.get_scale()

    return [step(parallel.batch(call)) for call in range(2 * CALLS)], state(model)


@loop
def scheduler_in_the_step(parallel):
    model = parallel.model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    def make():
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)

    schedule = make()

    @parallel.step
    def step(batch):
        loss = update(model, optimizer, batch)
        schedule.step()
        return loss, schedule.get_last_lr()

    return [step(parallel.batch(call)) for call in range(CALLS)], state(model)


@loop
def averaged_model(parallel):
    model = parallel.model(net())
    optimizer = adam(model)
    ema = AveragedModel(getattr(model, "module", model), multi_avg_fn=get_ema_multi_avg_fn(0.7))
    if isinstance(model, DistributedDataParallel):
        ema.module.load_state_dict(model.module.state_dict())

    @parallel.step
    def step(batch):
        loss = update(model, optimizer, batch)
        ema.update_parameters(getattr(model, "module", model))
        return loss

    return [step(parallel.batch(call)) for call in range(CALLS)], state(model, ema)


@loop
def shadow_tensors(parallel):
    model = parallel.model(net())
    optimizer = adam(model)
    shadow: dict[int, torch.Tensor] = {}

    @parallel.step
    def step(batch):
        loss = update(model, optimizer, batch)
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                shadow.setdefault(number, torch.zeros_like(p)).lerp_(p, 0.3)
        return loss

    return [step(parallel.batch(call)) for call in range(CALLS)], list(shadow.values())


@loop
def copy_in_the_step(parallel):
    model = parallel.model(net())
    optimizer, best = adam(model), []

    @parallel.step
    def step(batch):
        loss = update(model, optimizer, batch)
        best.append(copy.deepcopy(getattr(model, "module", model).state_dict()))
        return loss

    results = [step(parallel.batch(call)) for call in range(CALLS)]
    return results, [list(each.values()) for each in best]


def accumulating(model, optimizer, batch):
    for part in range(3):
        (error(model, (batch[0][part:], batch[1][part:])) / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    return batch[0].sum()


@loop
def accumulating_over_calls(parallel):
    model = parallel.model(net())
    optimizer = adam(model)

    @parallel.step
    def step(batch, last):
        loss = error(model, batch)
        loss.backward()
        norms = [p.grad.norm() for p in model.parameters()]
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach(), norms

    return [step(parallel.batch(call), call % 3 == 2) for call in range(7)], state(model)


def zeroing_in_place(model, optimizer, batch):
    optimizer.zero_grad(set_to_none=False)
    loss = error(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def zeroing_by_the_model(model, optimizer, batch):
    model.zero_grad()
    loss = error(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def zeroing_before_backward(model, optimizer, batch):
    loss = error(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def reading_kept_gradients(model, optimizer, batch):
    before = [0.0 if p.grad is None else p.grad.sum().item() for p in model.parameters()]
    return before, update(model, optimizer, batch)


def in_device_contexts(model, optimizer, batch):
    torch.set_default_device("cpu")
    with torch.device("cpu"):
        loss = update(model, optimizer, batch)
    torch.set_default_device(None)
    return loss


def never_zeroing(model, optimizer, batch):
    loss = error(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def updating_by_hand(model, optimizer, batch):
    loss = error(model, batch)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None
    return loss.detach()


def editing_states(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    for values in optimizer.state.values():
        values["exp_avg"].mul_(0.5)
        values["exp_avg_sq"] = values["exp_avg_sq"] * 2
    return loss


def reading_after_the_update(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    first = next(model.parameters())
    return loss, first.data.clone(), first.tolist(), first.detach().numpy().sum().item(), torch.cat([first, first])


def read_by_one_rank(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    if dist.get_rank() == 0:
        return loss, next(model.parameters()).norm()
    return loss


def read_by_one_rank_before_a_collective(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    if dist.get_rank() == 0:
        next(model.parameters()).norm().item()
    dist.all_reduce(loss)
    update(model, optimizer, batch)
    if dist.get_rank() == 1:
        next(model.parameters()).norm().item()
    return all_reduce(loss, "sum", dist.group.WORLD).wait()


def clipping(model, optimizer, batch):
    optimizer.zero_grad()
    loss = error(model, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm


def mapping(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    return loss, torch.func.vmap(getattr(model, "module", model))(batch[0]).detach()


def two_updates(model, optimizer, batch):
    return update(model, optimizer, batch), update(model, optimizer, batch)


def lbfgs(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = error(model, batch)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # the line search must take the same path on every rank
        return mean

    return optimizer.step(closure).detach()


def with_closure(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = error(model, batch)
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


def evaluating(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    model.eval()
    with torch.no_grad():
        after = error(model, batch)
    model.train()
    return loss, after


def frozen_by_turns(model, optimizer, batch):
    first = getattr(model, "module", model)[0]
    first.requires_grad_(False)
    loss = update(model, optimizer, batch)
    first.requires_grad_(True)
    return loss


def reentrant(model, optimizer, batch):
    optimizer.zero_grad()
    x = batch[0].clone().requires_grad_()
    inner = getattr(model, "module", model)
    hidden = checkpoint(inner[0], x, use_reentrant=False)
    loss = (inner[2](inner[1](hidden)) - batch[1]).pow(2).mean() if inner is model else error(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Branching(nn.Module):
    """Uses one of two layers, by the data of the rank."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, x):
        return self.out((self.left if x[0, 0] > 0 else self.right)(x).tanh())


def branching(model, optimizer, batch):
    return update(model, optimizer, batch)


class Normed(nn.Module):
    """A batch norm, whose buffers come from rank 0."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


def normed(model, optimizer, batch):
    return update(model, optimizer, batch)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(self.b(self.a(x).tanh()))


def tied(model, optimizer, batch):
    return update(model, optimizer, batch)


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.table(x.abs().long().clamp(max=8)).mean(1))


def sparse(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    return loss


def sparse_with_momentum(model, optimizer, batch):
    return update(model, optimizer, batch)


def gradients_after_the_update(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    return loss, [p.grad.clone() for p in model.parameters()]


def nesterov(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Complex(nn.Module):
    """Its gradients are lazy conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.cfloat, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.cfloat) @ self.weight.conj()).abs()


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.one, self.other
        return torch.cond(x.sum() > 0, lambda x: one(x) + other(x), lambda x: one(x) - other(x), (x,))


def complex_conjugates(model, optimizer, batch):
    return update(model, optimizer, batch)


def conditional(model, optimizer, batch):
    return update(model, optimizer, batch)


def gathering(model, optimizer, batch):
    """A loss over the outputs of all ranks, through a collective with a gradient."""
    optimizer.zero_grad()
    outputs = all_gather_tensor_autograd(model(batch[0][:5]), 0, dist.group.WORLD)
    loss = (outputs @ outputs.t()).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@loop
def gradients_for_another_step(parallel):
    """A step makes gradients, without the optimizer, and another one uses those of two calls."""
    model = parallel.model(net())
    optimizer = sgd(model)
    backward = parallel.step(lambda batch: error(model, batch).backward())

    @parallel.step
    def apply(model):
        optimizer.step()
        optimizer.zero_grad()

    for call in range(CALLS):
        backward(parallel.batch(call))
        if call % 2:
            apply(model)
    return state(model)


@loop
def gradient_hooks(parallel):
    """Hooks that change gradients, registered when the engine has its own: one that is the first to run, and others."""
    model = parallel.model(net())
    optimizer, calls = sgd(model), itertools.count()

    def clamp(param):
        param.grad.data.clamp_(-0.01, 0.01)

    def replace(param):
        param.grad = param.grad * param.grad.abs()

    def step(batch):
        call = next(calls)
        first, *_, last = model.parameters()
        if call in (2, 3):
            (last if call == 2 else first).register_post_accumulate_grad_hook(clamp)
            last.register_post_accumulate_grad_hook(replace)
        return update(model, optimizer, batch)

    step = parallel.step(step, bucket_mb=1e-5)  # a bucket for each gradient
    return [step(parallel.batch(call)) for call in range(6)], state(model)


@loop
def failed_backward(parallel):
    """The step catches an error of a backward, after which DDP could not go on, and runs another one."""
    model = parallel.model(net())
    optimizer = sgd(model)

    def fail(gradient):
        raise KeyError

    def step(batch, fails):
        if fails:
            hidden = model[0](batch[0])
            hidden.register_hook(fail)
            with contextlib.suppress(KeyError):
                model[2](hidden).sum().backward()
        return update(model, optimizer, batch)

    step = parallel.step(step, bucket_mb=1e-5)
    fails = isinstance(parallel, ByEngine)
    return [step(parallel.batch(call), fails and call % 2) for call in range(CALLS)], state(model)


@loop
def metric(parallel):
    """A module that only counts, beside a model with a sparse buffer, which DDP would refuse."""
    model, counter = net(), nn.BatchNorm1d(1, affine=False)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    optimizer = sgd(model)

    @parallel.step
    def step(batch):
        counter.num_batches_tracked += len(batch[0])
        update(model, optimizer, batch)

    for call in range(CALLS):
        step(parallel.batch(call))
    return state(counter)


@loop
def other_shapes_and_dtypes(parallel):
    """Parameters are others in the next call. DDP does not see that: it wraps the model again."""
    module = net()
    optimizer = sgd(module)

    @parallel.step
    def step(model, call):
        dtype = module[0].weight.dtype
        loss = update(model, optimizer, [part.to(dtype) for part in parallel.batch(call)])
        optimizer.zero_grad()
        if call == 1:
            module[0].weight.data, module[0].bias.data = torch.full((5, 6), 0.1), torch.zeros(5)
            module[2].weight.data = torch.full((3, 5), 0.2)
        elif call == 2:
            module.double()
        return loss

    results = [step(parallel.model(module), call) for call in range(CALLS)]
    return results, [(value - value.float()) * 1e9 for value in state(module)]


@loop
def optimizer_hooks(parallel):
    """Hooks of the optimizer that are registered between calls."""
    model = parallel.model(net())
    optimizer = adam(model)
    compiled = parallel.step(update)

    def parameters(hooked):
        return [param for group in hooked.param_groups for param in group["params"]]

    def halve(hooked, args, kwargs):
        for param in parameters(hooked):
            param.grad.mul_(0.5)

    def clamp(hooked, args, kwargs):
        for param in parameters(hooked):
            param.data.clamp_(-0.3, 0.3)

    results = []
    for call in range(6):
        if call == 2:
            optimizer.register_step_pre_hook(halve)
        elif call == 4:
            optimizer.register_step_post_hook(clamp)
        results.append(compiled(model, optimizer, parallel.batch(call)))
    return results, state(model)


for each in (
    importing,
    printing,
    looking_for_nan,
    all_reducing,
    accumulating,
    zeroing_in_place,
    zeroing_by_the_model,
    zeroing_before_backward,
    reading_kept_gradients,
    in_device_contexts,
    never_zeroing,
    updating_by_hand,
    editing_states,
    reading_after_the_update,
    read_by_one_rank,
    read_by_one_rank_before_a_collective,
    clipping,
    mapping,
    two_updates,
    evaluating,
    frozen_by_turns,
    with_closure,
):
    simple(each)
simple(lbfgs, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
simple(branching, build=Branching)
simple(normed, build=Normed)
simple(tied, build=Tied)
simple(sparse, sgd, Sparse)
simple(sparse_with_momentum, nesterov, Sparse)
simple(gradients_after_the_update, nesterov)
simple(complex_conjugates, sgd, Complex)
simple(conditional, build=Conditional)
simple(gathering, sgd)
