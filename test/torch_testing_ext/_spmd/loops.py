"""Training loops that people write, each written once, and run under DDP and by the compiled step.

A loop gets a `Parallel`, which wraps models (for DDP) or steps (for the compiler), and returns all that is to be equal.
Under DDP, gradients of a loop are the mean over ranks of those of one device.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from torch_testing_ext.distributed._spmd import DataParallel, compile

CALLS = 4


class Parallel:
    """Training under DDP: wraps models."""

    def __init__(self, rank: int, device: str = "cpu") -> None:
        self.rank, self.device = rank, device

    def model(self, module: nn.Module) -> Any:
        return DistributedDataParallel(module, find_unused_parameters=True)

    def step(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return function

    def batch(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Another number of rows on each rank."""
        generator = torch.Generator().manual_seed(1000 * call + self.rank)
        options = {"generator": generator, "device": "cpu"}
        rows = 5 + self.rank
        return torch.randn(rows, 6, **options).to(self.device), torch.randn(rows, 3, **options).to(self.device)


class ByCompiler(Parallel):
    """Training by compiled steps: wraps steps."""

    def __init__(self, rank: int, style: str, device: str = "cpu") -> None:
        super().__init__(rank, device)
        self.style = style

    def model(self, module: nn.Module) -> Any:
        return module

    def step(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return compile(parallel_mode=DataParallel(self.style, **options))(function)


def net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes or (6, 7, 3)):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def inner(model: Any) -> Any:
    """The module inside DDP's wrapper."""
    return getattr(model, "module", model)


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


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def nesterov(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).detach().clone()


def state(*models: Any) -> list[torch.Tensor]:
    return [whole(value) for model in models for value in (*model.parameters(), *model.buffers())]


LOOPS: dict[str, Callable[[Any], Any]] = {}


def loop(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    LOOPS[function.__name__] = function
    return function


def simple(
    step: Callable[..., Any],
    make: Callable[[Any], Any] = adam,
    build: Callable[[], nn.Module] = net,
    between: Callable[..., Any] | None = None,
    name: str = "",
) -> None:
    """Register a loop whose step takes the model, the optimizer and a batch.

    After each call, `between(model, optimizer, batch, call)` is called, if there is one.
    """

    def run(parallel: Any) -> Any:
        model = parallel.model(build())
        optimizer = make(model)
        compiled, results = parallel.step(step), []
        for call in range(CALLS):
            results.append(compiled(model, optimizer, parallel.batch(call)))
            if between is not None:
                results.append(between(model, optimizer, parallel.batch(50 + call), call))
        grads = [None if param.grad is None else whole(param.grad) for param in model.parameters()]
        states = [value for values in optimizer.state.values() for value in values.values()]
        return results, state(model), grads, [whole(value) for value in states if isinstance(value, torch.Tensor)]

    LOOPS[name or (between or step).__name__] = run


# -- Losses, gradients and updates


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
    return loss.detach()


def all_reducing(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def accumulating(model, optimizer, batch):
    for part in range(3):
        (error(model, (batch[0][part:], batch[1][part:])) / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    return batch[0].sum()


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


def never_zeroing(model, optimizer, batch):
    loss = error(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def reading_gradients_of_the_last_call(model, optimizer, batch):
    before = [0.0 if param.grad is None else param.grad.sum().item() for param in model.parameters()]
    return before, update(model, optimizer, batch)


def returning_gradients(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    return loss, [param.grad.clone() for param in model.parameters()]


def updating_by_hand(model, optimizer, batch):
    loss = error(model, batch)
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None
    return loss.detach()


def clipping(model, optimizer, batch):
    optimizer.zero_grad()
    loss = error(model, batch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm, norm.item()


def clipping_values(model, optimizer, batch):
    optimizer.zero_grad()
    loss = error(model, batch)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    return loss.detach()


def scaling_gradients(model, optimizer, batch):
    optimizer.zero_grad()
    loss = error(model, batch)
    loss.backward()
    for param in model.parameters():
        param.grad.div_(param.grad.norm() / math.sqrt(param.numel()) + 0.1)
        param.grad = param.grad + torch.ones(param.shape) * 0.01
    inner(model)[2].weight.grad[0] = 0.1
    optimizer.step()
    return loss.detach(), [(param.numel(), len(param)) for param in model.parameters()]


def logging(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    with torch.no_grad():
        grads = [param.grad for param in model.parameters()]
        squares = sum(grad.pow(2).sum() for grad in grads)
        largest = torch.stack([grad.abs().max() for grad in grads]).max()
        means = torch.stack([param.mean() for param in model.parameters()])
    return loss, squares.item(), largest, means


def penalizing_weights(model, optimizer, batch):
    """The weight of the penalty differs between ranks, and its gradient must be averaged, too."""
    optimizer.zero_grad()
    loss = error(model, batch) + sum(param.pow(2).sum() for param in model.parameters()) * batch[0].mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def penalizing_gradients(model, optimizer, batch):
    optimizer.zero_grad()
    loss = error(model, batch)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + 0.1 * sum(grad.pow(2).sum() for grad in grads)).backward()
    optimizer.step()
    return loss.detach()


def orthogonalizing(model, optimizer, batch):
    weight = inner(model)[0].weight
    optimizer.zero_grad()
    loss = error(model, batch) + (weight @ weight.t() - torch.eye(7)).pow(2).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def sharpness_aware(model, optimizer, batch):
    """Two backwards, between which the weights move along the gradient, and back after them."""
    optimizer.zero_grad()
    error(model, batch).backward()
    params = [*model.parameters()]
    norm = torch.stack([param.grad.norm() for param in params]).norm()
    moves = [param.grad * (0.05 / norm) for param in params]
    with torch.no_grad():
        torch._foreach_add_(params, moves)
    optimizer.zero_grad()
    error(model, batch).backward()
    with torch.no_grad():
        torch._foreach_sub_(params, moves)
    optimizer.step()


def training_twice(model, optimizer, batch):
    return update(model, optimizer, batch), update(model, optimizer, batch)


def evaluating(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    model.eval()
    with torch.no_grad():
        after = error(model, batch)
    model.train()
    return loss, after


def freezing_by_turns(model, optimizer, batch):
    inner(model)[0].requires_grad_(False)
    loss = update(model, optimizer, batch)
    inner(model)[0].requires_grad_(True)
    return loss


def masking(model, optimizer, batch):
    """The number of errors that count depends on the data."""
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1])[batch[1] > 0].pow(2).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def computing_in_half(model, optimizer, batch):
    optimizer.zero_grad()
    with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
        out = model(batch[0])
    loss = (out.float() - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def checkpointing(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (checkpoint(model, batch[0], use_reentrant=False) - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def gathering_outputs(model, optimizer, batch):
    """A loss over the outputs of all ranks, through a collective with a gradient."""
    optimizer.zero_grad()
    outputs = all_gather_tensor_autograd(model(batch[0][:5]), 0, dist.group.WORLD)
    loss = (outputs @ outputs.t()).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def mapping(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    return loss, torch.func.vmap(inner(model))(batch[0]).detach()


def calling_with_other_weights(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    half = {name: param.detach() * 0.5 for name, param in inner(model).named_parameters()}
    return loss, torch.func.functional_call(inner(model), half, (batch[0],)).detach()


def with_closure(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = error(model, batch)
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


def lbfgs(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = error(model, batch)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # the line search must take the same path on every rank
        return mean

    return optimizer.step(closure).detach()


def backward_of_each_loss(model, optimizer, batch):
    """DDP can run one backward after a forward: it adds the losses."""
    optimizer.zero_grad()
    outputs = model(batch[0])
    losses = [(outputs - batch[1]).pow(2).mean(), outputs.abs().mean(), 0.1 * outputs.exp().mean()]
    for loss in [sum(losses)] if isinstance(model, DistributedDataParallel) else losses:
        loss.backward(retain_graph=True)
    optimizer.step()
    return [loss.item() for loss in losses], [param.grad.clone() for param in model.parameters()]


def projecting(model, optimizer, batch, averages=True):
    """Gradients of two losses, of which one gives way to the other, are computed and assigned by the program."""
    params, outputs = [*model.parameters()], inner(model)(batch[0])
    flat = []
    for loss in ((outputs - batch[1]).pow(2).mean(), outputs.mean()):
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        flat.append(nn.utils.parameters_to_vector(grads))
        if averages:
            dist.all_reduce(flat[-1])
    dot = flat[0] @ flat[1]
    total = flat[0] - dot.clamp(max=0) / flat[1].pow(2).sum() * flat[1]
    for param, grad in zip(params, total.split([param.numel() for param in params]), strict=True):
        param.grad = grad.view_as(param)
    optimizer.step()
    return dot


def projecting_what_a_rank_has(model, optimizer, batch):
    return projecting(model, optimizer, batch, averages=False)


# -- Reads of parameters and writes to them


def reading_parameters(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    first = next(model.parameters())
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    return loss, first.data.clone(), first.tolist(), first.detach().cpu().numpy().sum().item(), vector, first.std()


def reading_on_one_rank(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    if dist.get_rank() == 0:
        return loss, next(model.parameters()).norm()
    return loss


def reading_on_one_rank_before_a_collective(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    if dist.get_rank() == 0:
        next(model.parameters()).norm().item()
    dist.all_reduce(loss)
    update(model, optimizer, batch)
    if dist.get_rank() == 1:
        next(model.parameters()).norm().item()
    return all_reduce(loss, "sum", dist.group.WORLD).wait()


def clamping_weights(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    with torch.no_grad():
        inner(model)[0].weight.clamp_(-0.1, 0.1)
    return loss


def normalizing_weights(model, optimizer, batch):
    weight = inner(model)[0].weight
    with torch.no_grad():
        weight.copy_(F.normalize(weight, dim=1))
    loss = update(model, optimizer, batch)
    with torch.no_grad():
        nn.init.ones_(inner(model)[2].bias)
        weight.div_(weight.norm(dim=1, keepdim=True))
    return loss


def writing_before_the_forward(model, optimizer, batch):
    first, last = inner(model)[0], inner(model)[2]
    first.weight.data.mul_(0.9)
    last.weight.data[1].zero_()
    last.bias.data[0] = 0.5
    with torch.no_grad():
        first.weight.t()[2:4].add_(0.1)
    return update(model, optimizer, batch)


def editing_states(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    for values in optimizer.state.values():
        values["exp_avg"].mul_(0.5)
        values["exp_avg_sq"] = values["exp_avg_sq"] * 2
    return loss


def reading_states(model, optimizer, batch):
    optimizer.zero_grad()
    loss = error(model, batch)
    loss.backward()
    for param in model.parameters():
        if optimizer.state.get(param):
            param.grad.add_(optimizer.state[param]["momentum_buffer"], alpha=0.1)
    optimizer.step()
    return loss.detach(), [values["momentum_buffer"].norm().item() for values in optimizer.state.values()]


for each in (
    printing,
    looking_for_nan,
    all_reducing,
    accumulating,
    zeroing_in_place,
    zeroing_by_the_model,
    never_zeroing,
    reading_gradients_of_the_last_call,
    updating_by_hand,
    clipping,
    clipping_values,
    scaling_gradients,
    logging,
    penalizing_weights,
    penalizing_gradients,
    orthogonalizing,
    sharpness_aware,
    training_twice,
    evaluating,
    freezing_by_turns,
    masking,
    computing_in_half,
    checkpointing,
    mapping,
    calling_with_other_weights,
    with_closure,
    reading_parameters,
    reading_on_one_rank,
    reading_on_one_rank_before_a_collective,
    clamping_weights,
    normalizing_weights,
    writing_before_the_forward,
    editing_states,
):
    simple(each)
simple(reading_states, nesterov)
simple(returning_gradients, nesterov)
simple(gathering_outputs, sgd)
simple(backward_of_each_loss, nesterov)
simple(projecting, nesterov)
simple(projecting_what_a_rank_has, sgd)
simple(lbfgs, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))


# -- Optimizers


class RowWise(torch.optim.Optimizer):
    """Keeps states of other shapes than the parameter's, and multiplies matrices in its update."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for param in (param for group in self.param_groups for param in group["params"]):
            values = self.state[param]
            if not values:
                values["rows"], values["momentum"] = torch.zeros(param.shape[0]), torch.zeros(param.shape)
            values["rows"].add_(param.grad.pow(2).flatten(1).mean(1) if param.dim() > 1 else param.grad.pow(2))
            values["momentum"].lerp_(param.grad, 0.1)
            change = values["momentum"]
            if param.dim() == 2:
                change = (change @ change.t() / (change.norm() + 1)) @ change
            param.sub_(0.1 * change / values["rows"].sqrt().add(1).view(-1, *[1] * (param.dim() - 1)))


def by(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda model: optimizer(model.parameters(), **options)


OPTIMIZERS = {
    "sgd": by(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam_fused": by(torch.optim.Adam, lr=0.1, fused=True),
    "nadam": by(torch.optim.NAdam, lr=0.1),
    "adagrad": by(torch.optim.Adagrad, lr=0.1),
    "adafactor": by(torch.optim.Adafactor),
    "row_wise": by(RowWise),
}
for title, make in OPTIMIZERS.items():
    simple(update, make, name=title)
simple(update, by(torch.optim.Muon, lr=0.1), lambda: nn.Linear(6, 3, bias=False), name="muon")


# -- Models


class Branching(nn.Module):
    """Uses one of two layers, by the data of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((self.left if x[0, 0] > 0 else self.right)(x).tanh())


class Normed(nn.Module):
    """A batch norm, whose buffers come from rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.b(self.a(x).tanh()))


class Table(nn.Module):
    """An embedding, with sparse gradients if asked for."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(x.abs().long().clamp(max=8)).mean(1))


class Complex(nn.Module):
    """Gradients of its weight are lazy conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.cdouble))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.cdouble) @ self.weight.conj()).abs()


class Odd(nn.Module):
    """Parameters of one row, of no rows, of no dimensions, frozen ones, and one of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.empty = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(0, 3))
        self.gain, self.scale = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(6))
        self.frozen, self.layer = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.frozen(x * self.scale)) * self.row * self.gain + self.empty.sum()


class Recurrent(nn.Module):
    """An LSTM and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x.view(len(x), 3, 2))[0][:, -1])


class Attending(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embed(x.abs().long().clamp(max=6))).mean(1))


def reparametrized() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(6, 7)), nn.Tanh(), spectral_norm(nn.Linear(7, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "branching": (Branching, adam),
    "normed": (Normed, sgd),
    "tied": (Tied, adam),
    "sparse": (lambda: Table(sparse=True), sgd),
    "sparse_with_momentum": (lambda: Table(sparse=True), nesterov),
    "complex": (Complex, sgd),
    "odd": (Odd, adam),
    "recurrent": (Recurrent, adam),
    "attending": (Attending, adam),
    "reparametrized": (reparametrized, adam),
}
for title, (build, make) in MODELS.items():
    simple(update, make, build, name=title)


# -- Where a step finds its model, and what else it has


@loop
def counting(parallel):
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
def method_of_a_trainer(parallel):
    class Trainer:
        def __init__(self):
            self.model = parallel.model(net())
            self.optimizer = adam(self.model)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

        def train(self, batch):
            loss = update(self.model, self.optimizer, batch)
            self.scheduler.step()
            return loss, self.scheduler.get_last_lr()

    Trainer.train = parallel.step(Trainer.train)
    trainer = Trainer()
    return [trainer.train(parallel.batch(call)) for call in range(CALLS)], state(trainer.model)


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
        for param in d.parameters():
            param.data.clamp_(-0.2, 0.2)
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
    optimizer, scaler = adam(model), torch.amp.GradScaler(parallel.device, init_scale=2.0**127)

    @parallel.step
    def step(batch):
        optimizer.zero_grad()
        scaler.scale(error(model, batch)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return norm.isfinite(), scaler.get_scale()

    return [step(parallel.batch(call)) for call in range(2 * CALLS)], state(model)


@loop
def scheduler_of_momentum(parallel):
    model = parallel.model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)

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
    average = AveragedModel(inner(model), multi_avg_fn=get_ema_multi_avg_fn(0.7))
    average.module.load_state_dict(inner(model).state_dict())

    @parallel.step
    def step(batch):
        loss = update(model, optimizer, batch)
        average.update_parameters(inner(model))
        return loss

    return [step(parallel.batch(call)) for call in range(CALLS)], state(model, average)


@loop
def shadow_tensors(parallel):
    model = parallel.model(net())
    optimizer, shadow = adam(model), {}

    @parallel.step
    def step(batch):
        loss = update(model, optimizer, batch)
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                shadow.setdefault(number, torch.zeros_like(param)).lerp_(param, 0.3)
        return loss

    return [step(parallel.batch(call)) for call in range(CALLS)], list(shadow.values())


@loop
def copies_of_the_state(parallel):
    model = parallel.model(net())
    optimizer, best = adam(model), []

    @parallel.step
    def step(batch):
        loss = update(model, optimizer, batch)
        best.append(copy.deepcopy(inner(model).state_dict()))
        return loss

    results = [step(parallel.batch(call)) for call in range(CALLS)]
    return results, [list(each.values()) for each in best]


@loop
def accumulating_over_calls(parallel):
    model = parallel.model(net())
    optimizer = adam(model)

    @parallel.step
    def step(batch, is_last):
        loss = error(model, batch)
        loss.backward()
        norms = [param.grad.norm() for param in model.parameters()]
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach(), norms

    return [step(parallel.batch(call), call % 3 == 2) for call in range(7)], state(model)


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
    """Hooks that change gradients, registered in the step: one that is the first to run, and others."""
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
def optimizer_hooks(parallel):
    """Hooks of the optimizer that are registered between calls."""
    model = parallel.model(net())
    optimizer, compiled, results = adam(model), parallel.step(update), []

    def halve(hooked, args, kwargs):
        for param in (param for group in hooked.param_groups for param in group["params"]):
            param.grad.mul_(0.5)

    def clamp(hooked, args, kwargs):
        for param in (param for group in hooked.param_groups for param in group["params"]):
            param.data.clamp_(-0.3, 0.3)

    for call in range(6):
        if call == 2:
            optimizer.register_step_pre_hook(halve)
        elif call == 4:
            optimizer.register_step_post_hook(clamp)
        results.append(compiled(model, optimizer, parallel.batch(call)))
    return results, state(model)


@loop
def failing_backward(parallel):
    """The step catches an error of a backward, after which DDP could not go on, and runs another one."""
    model = parallel.model(net())
    optimizer = sgd(model)

    def fail(gradient):
        raise KeyError

    @parallel.step
    def step(batch, fails):
        if fails:
            hidden = model[0](batch[0])
            hidden.register_hook(fail)
            with contextlib.suppress(KeyError):
                model[2](hidden).sum().backward()
        return update(model, optimizer, batch)

    fails = isinstance(parallel, ByCompiler)
    return [step(parallel.batch(call), fails and call % 2) for call in range(CALLS)], state(model)


@loop
def gradients_in_one_buffer(parallel):
    """Gradients are views of one tensor, which the program clears and scales itself."""
    model = parallel.model(net())
    optimizer, params = nesterov(model), [*model.parameters()]
    sizes = [param.numel() for param in params]
    flat = torch.zeros(sum(sizes))
    for param, part in zip(params, flat.split(sizes), strict=True):
        param.grad = part.view(param.shape)

    @parallel.step
    def step(batch):
        flat.zero_()
        error(model, batch).backward()
        norm = flat.norm()
        flat.mul_(0.5)
        optimizer.step()
        return norm

    return [step(parallel.batch(call)) for call in range(CALLS)], state(model)


@loop
def gradients_from_before_the_first_call(parallel):
    """The first call begins with an update by gradients that the program has computed outside of a step."""
    torch.manual_seed(0)
    model = parallel.model(net())
    optimizer = nesterov(model)
    error(model, parallel.batch(40)).backward()

    @parallel.step
    def step(batch):
        optimizer.step()
        optimizer.zero_grad()
        loss = error(model, batch)
        loss.backward()
        return loss.detach()

    return [step(parallel.batch(call)) for call in range(CALLS)], state(model)


@loop
def updating_views_of_weights(parallel):
    """The program keeps plain views of the weights, and updates these."""
    model = parallel.model(net())
    params = [*model.parameters()]
    views = [param.data for param in params]

    @parallel.step
    def step(batch):
        for param in params:
            param.grad = None
        loss = error(model, batch)
        loss.backward()
        for view, param in zip(views, params, strict=True):
            view -= 0.1 * param.grad
        return loss.detach()

    return [step(parallel.batch(call)) for call in range(CALLS)], state(model)


@loop
def updating_in_the_backward(parallel):
    """Each parameter has an optimizer, which steps in a hook, before anything is averaged."""
    model = parallel.model(net())
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    step = parallel.step(lambda batch: error(model, batch).backward())
    for call in range(CALLS):
        step(parallel.batch(call))
    return state(model) if parallel.rank == 0 else None


@loop
def raising_in_some_calls(parallel):
    model = parallel.model(net())
    optimizer, failed = adam(model), []

    @parallel.step
    def step(batch, fails):
        optimizer.zero_grad()
        error(model, batch).backward()
        if fails:
            raise FloatingPointError
        optimizer.step()

    for call in range(CALLS + 2):
        try:
            step(parallel.batch(call), call in (1, 4))
        except FloatingPointError:
            failed.append(call)
    return failed, state(model), [whole(param.grad) for param in model.parameters()]


@loop
def resuming(parallel):
    """A new model, optimizer, scheduler and step go on from a file with whole values."""

    def train(model, optimizer, scheduler, batch):
        loss = update(model, optimizer, batch)
        scheduler.step()
        return loss

    def start():
        model = net()
        optimizer = adam(model)
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * CALLS)

    results, saved = [], io.BytesIO()
    for begin in (0, CALLS):
        parts = start()
        if begin:
            saved.seek(0)
            for part, values in zip(parts, torch.load(saved, weights_only=False), strict=True):
                part.load_state_dict(values)
        model, step = parallel.model(parts[0]), parallel.step(train)
        results += [step(model, *parts[1:], parallel.batch(begin + call)) for call in range(CALLS - 1)]
        values = [part.state_dict() for part in (inner(model), *parts[1:])]
        saved = io.BytesIO()
        torch.save(torch.utils._pytree.tree_map_only(torch.Tensor, whole, values), saved)
    return results, state(model), parts[2].get_last_lr()


@loop
def returning_to_the_best(parallel):
    """The step itself keeps the state of model and optimizer, and loads it when the loss has grown."""
    model = parallel.model(net())
    optimizer, best = torch.optim.AdamW(model.parameters(), lr=0.3), [math.inf]

    @parallel.step
    def step(batch):
        optimizer.zero_grad()
        loss = error(model, batch)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if mean < best[0]:
            best[:] = mean.item(), *(copy.deepcopy(each.state_dict()) for each in (inner(model), optimizer))
        elif mean > 1.05 * best[0]:
            inner(model).load_state_dict(best[1])
            optimizer.load_state_dict(best[2])
            optimizer.param_groups[0]["lr"] *= 0.5
        else:
            optimizer.step()
        return mean, optimizer.param_groups[0]["lr"]

    return [step(parallel.batch(call)) for call in range(8)], state(model)


# -- Teachers


def teaching(freeze: bool, name: str) -> None:
    """Register a loop whose teacher follows the student in the step."""

    def run(parallel: Any) -> Any:
        student = parallel.model(net())
        teacher = copy.deepcopy(inner(student)).requires_grad_(not freeze)
        optimizer = adam(student)

        @parallel.step
        def step(batch):
            optimizer.zero_grad()
            with torch.no_grad():
                target = teacher(batch[0])
            loss = (student(batch[0]) - target).pow(2).mean() + error(student, batch)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), inner(student).parameters(), strict=True):
                    mine.mul_(0.7).add_(theirs.data, alpha=0.3)
            return loss.detach()

        results = [step(parallel.batch(call)) for call in range(CALLS)]
        return results, state(student, teacher)

    LOOPS[name] = run


teaching(True, "teacher")
teaching(False, "teacher_that_could_train")


@loop
def momentum_encoder(parallel):
    """MoCo: the key encoder follows the query encoder before the loss, and a queue is a buffer."""
    query = parallel.model(net())
    key = copy.deepcopy(inner(query)).requires_grad_(False)
    if inner(query) is query:
        for mine, theirs in zip(query.parameters(), key.parameters(), strict=True):
            dist.broadcast(mine.data, 0)
            theirs.copy_(mine.data)
    optimizer = sgd(query)
    queue = torch.zeros(8, 3)

    @parallel.step
    def step(batch):
        with torch.no_grad():
            for mine, theirs in zip(inner(query).parameters(), key.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + mine.data * 0.1
            keys = F.normalize(key(batch[0]), dim=1)
        logits = F.normalize(query(batch[0]), dim=1) @ torch.cat([keys, queue]).t()
        loss = F.cross_entropy(logits, torch.arange(len(keys)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue.copy_(torch.cat([keys, queue])[:8])
        return loss.detach()

    return [step(parallel.batch(call)) for call in range(CALLS)], state(query, key), queue


class Residual(nn.Module):
    """Layers of one shape, of which a call leaves out some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, is_kept: list[bool]) -> torch.Tensor:
        for layer, is_used in zip(self.layers, is_kept, strict=True):
            x = x + torch.tanh(layer(x)) if is_used else x
        return self.last(x)


@loop
def dropping_layers(parallel):
    """Each rank leaves out layers of its own, and reads the gradients of all."""
    model = parallel.model(Residual())
    optimizer = nesterov(model)

    @parallel.step
    def step(batch, is_kept):
        optimizer.zero_grad()
        loss = (model(batch[0], is_kept) - batch[1]).pow(2).mean()
        loss.backward()
        # A layer that no rank has used has none.
        grads = [] if all(is_kept) else [param.grad for param in model.parameters() if param.grad is not None]
        norms = [grad.norm() for grad in grads]
        optimizer.step()
        return loss.detach(), norms

    kept = [[True] * 4, *([(call + layer + parallel.rank) % 2 == 0 for layer in range(4)] for call in range(4))]
    return [step(parallel.batch(call), is_kept) for call, is_kept in enumerate(kept)], state(model)


@loop
def reaching_gradients_twice_later(parallel):
    """A backward runs within another one, and gradients get more after they have been sent. DDP adds the losses."""
    model = parallel.model(net())
    optimizer = nesterov(model)

    def twice(batch):
        if not isinstance(parallel, ByCompiler):
            return 1.5 * error(model, batch)
        inputs, targets = batch[0].clone().requires_grad_(), batch[1]
        return (checkpoint(model, inputs, use_reentrant=True) - targets).pow(2).mean() + 0.5 * error(model, batch)

    @parallel.step
    def step(batch, is_twice):
        optimizer.zero_grad()
        loss = twice(batch) if is_twice else error(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return [step(parallel.batch(call), call in (3, 4)) for call in range(7)], state(model)


# -- Between calls


@loop
def validating_by_a_step(parallel):
    """An evaluation is a compiled step, too."""
    model = parallel.model(net())
    optimizer, step, results = adam(model), parallel.step(update), []

    @parallel.step
    def evaluate(model, batch):
        model.eval()
        with torch.no_grad():
            loss = error(model, batch)
        model.train()
        return loss

    for call in range(CALLS):
        results.append(step(model, optimizer, parallel.batch(call)))
        results.append(evaluate(model, parallel.batch(50 + call)))
    return results, state(model)


@loop
def validating_averages(parallel):
    """An evaluation puts averaged weights into the model by `.data`, and takes them out again."""
    model = parallel.model(net())
    optimizer, averages = adam(model), {}

    @parallel.step
    def train(batch):
        loss = update(model, optimizer, batch)
        for name, param in inner(model).named_parameters():
            averages[name] = 0.8 * averages.get(name, param.detach()) + 0.2 * param.detach()
        return loss

    @parallel.step
    def evaluate(batch):
        trained = {name: param.data for name, param in inner(model).named_parameters()}
        for name, param in inner(model).named_parameters():
            param.data = averages[name]
        with torch.no_grad():
            loss = error(model, batch)
        for name, param in inner(model).named_parameters():
            param.data = trained[name]
        return loss

    results = [(train(parallel.batch(call)), evaluate(parallel.batch(60 + call))) for call in range(CALLS)]
    return results, state(model), [*averages.values()]


def validating(model, optimizer, batch, call):
    with torch.no_grad():
        return error(model, batch)


def saving_and_loading(model, optimizer, batch, call):
    file = io.BytesIO()
    torch.save({"model": inner(model).state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    inner(model).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return [whole(value) for value in saved["model"].values()]


def restoring_the_best(model, optimizer, batch, call):
    if call == 1:
        model.__dict__["best"] = copy.deepcopy(inner(model).state_dict()), copy.deepcopy(optimizer.state_dict())
    if call == 2:
        weights, states = model.__dict__.pop("best")
        inner(model).load_state_dict(weights)
        optimizer.load_state_dict(states)


def clipping_between_calls(model, optimizer, batch, call):
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return whole(norm), [whole(param.grad) for param in model.parameters()]


def writing_between_calls(model, optimizer, batch, call):
    with torch.no_grad():
        first, *_, last = model.parameters()
        first.mul_(0.9)
        last.zero_()


def freezing_between_calls(model, optimizer, batch, call):
    inner(model)[0].requires_grad_(call % 2 == 1)


def unfreezing(model, optimizer, batch, call):
    """The optimizer gets another layer between calls."""
    if call == 1:
        optimizer.add_param_group({"params": [*inner(model)[0].parameters()], "lr": 0.02})


@loop
def adapting_a_copy(parallel):
    """Each call updates a new copy of the trained model by hand, without an optimizer."""
    model = parallel.model(net())
    optimizer, train, results = adam(model), parallel.step(update), []

    @parallel.step
    def adapt(model, batch):
        loss = error(model, batch)
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        model.zero_grad()
        return loss.detach()

    for call in range(CALLS):
        results.append(train(model, optimizer, parallel.batch(call)))
        copied = copy.deepcopy(inner(model)).train()
        copied.zero_grad()
        copied = parallel.model(copied)
        results += [adapt(copied, parallel.batch(10 * call + part)) for part in range(2)]
        results.append(state(copied))
    return results, state(model)


def averaging_between_calls(model, optimizer, batch, call):
    averages = model.__dict__.setdefault("averages", [param.detach().clone() for param in model.parameters()])
    with torch.no_grad():
        for average, param in zip(averages, model.parameters(), strict=True):
            average.lerp_(param.detach(), 0.3)
    return [whole(average) for average in averages]


def reading_between_calls(model, optimizer, batch, call):
    norms = [whole(param.norm()) for param in model.parameters()]
    return norms, sum(param.numel() for param in model.parameters()), [param.shape for param in model.parameters()]


def changing_the_rate(model, optimizer, batch, call):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.1 * call


for each in (
    validating,
    saving_and_loading,
    restoring_the_best,
    clipping_between_calls,
    writing_between_calls,
    freezing_between_calls,
    averaging_between_calls,
    reading_between_calls,
    changing_the_rate,
):
    simple(update, between=each)


def takes_new_groups(make: Callable[[Any], torch.optim.Optimizer]) -> bool:
    """Whether the optimizer can step with parameters that it gets later: Adagrad cannot in torch 2.11."""
    earlier, later = (torch.zeros(1, requires_grad=True) for _ in range(2))
    optimizer = make([earlier])
    optimizer.add_param_group({"params": [later]})
    later.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


if takes_new_groups(torch.optim.Adagrad):
    simple(update, lambda model: torch.optim.Adagrad(inner(model)[2].parameters(), lr=0.1), between=unfreezing)
