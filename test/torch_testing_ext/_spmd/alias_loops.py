"""Training loops in which something else shares memory with a parameter, a gradient or a state, or keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from loops import CALLS, ByEngine, adam, error, net, sgd, state, update, whole, zeroing_in_place
from outside_loops import inner
from torch import nn

LOOPS: dict[str, Callable[[Any], Any]] = {}


def aliasing(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    LOOPS[function.__name__] = function
    return function


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def simple(step: Callable[..., Any], make: Callable[[Any], Any] = adam, name: str = "") -> None:
    """Register a loop whose step takes the model, the optimizer and a batch. It returns the optimizer's states, too."""

    def run(parallel: Any) -> Any:
        model = parallel.model(net())
        optimizer = make(model)
        compiled = parallel.step(step)
        results = [compiled(model, optimizer, parallel.batch(call)) for call in range(CALLS)]
        states = [value for values in optimizer.state.values() for value in values.values()]
        return results, state(model), [whole(value) for value in states if isinstance(value, torch.Tensor)]

    LOOPS[name or step.__name__] = run


# -- states of optimizers that the step edits


def filling_states(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    for values in optimizer.state.values():
        values["exp_avg"].fill_(0.01)
        values["exp_avg_sq"].fill_(0.1)
    return loss


def masking_states(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    for param, values in optimizer.state.items():
        values["exp_avg"].mul_((torch.arange(param.numel()).view(param.shape) % 2).float())
        values["exp_avg"].add_(param.detach(), alpha=0.1)
        values["exp_avg_sq"][0] = 0.5
    return loss


def replacing_states(model, optimizer, batch):
    for param, values in optimizer.state.items():
        values["exp_avg_sq"] = torch.ones_like(param) * 0.1
    return update(model, optimizer, batch)


def clearing_states(model, optimizer, batch):
    loss = update(model, optimizer, batch)
    optimizer.state.clear()
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


for each in (filling_states, masking_states, replacing_states, clearing_states):
    simple(each)
simple(reading_states, momentum)


# -- optimizers that keep tensors of a parameter


class Keeping(torch.optim.Optimizer):
    """Keeps what `keep` returns for a parameter, and adds it to the parameter in the next step."""

    def __init__(self, params, keep):
        self.keep = keep
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for param in (param for group in self.param_groups for param in group["params"]):
            values = self.state[param]
            if "kept" in values:
                param.add_(values["kept"], alpha=-0.05)
            param.add_(param.grad, alpha=-0.1)
            values["kept"] = self.keep(param)


def decaying_first(model, optimizer, batch):
    """Parameters change before the optimizer reads what it has kept of them."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    return update(model, optimizer, batch)


KEPT = {
    "gradient": lambda param: param.grad,
    "data": lambda param: param.data,
    "view": lambda param: param.detach().view(-1).view(param.shape),
    "param": lambda param: param,
}
for kept_name, keep in KEPT.items():
    for each in (update, zeroing_in_place, decaying_first):
        simple(each, lambda model, keep=keep: Keeping(model.parameters(), keep), f"keeping_{kept_name}_{each.__name__}")


# -- what a step returns or stores


def returning(name: str, select: Callable[[Any], Any], zero: bool | None) -> None:
    """Register a loop whose step returns parts of the model, which are looked at after all calls.

    `zero`: whether `zero_grad` drops gradients; None to accumulate them.
    """

    def run(parallel: Any) -> Any:
        model = parallel.model(net())
        optimizer = sgd(model)

        @parallel.step
        def step(batch):
            if zero is not None:
                optimizer.zero_grad(set_to_none=zero)
            error(model, batch).backward()
            optimizer.step()
            return select(model)

        return [step(parallel.batch(call)) for call in range(CALLS)], state(model)

    LOOPS[name] = run


def gradients(model):
    return [param.grad for param in model.parameters()]


returning("returning_gradients_dropped", gradients, True)
returning("returning_gradients_zeroed", gradients, False)
returning("returning_gradients_kept", gradients, None)
returning("returning_flat_gradients", lambda model: [param.grad.view(-1) for param in model.parameters()], None)
returning("returning_parameters", lambda model: {"all": [*model.parameters()]}, True)
returning("returning_data", lambda model: [param.data.t() for param in model.parameters()], True)
returning("returning_states", lambda model: dict(inner(model).state_dict()), True)


def storing(name: str, keep: Callable[[Any], Any]) -> None:
    """Register a loop whose step stores tensors of parameters in a dict, and uses them in the next call."""

    def run(parallel: Any) -> Any:
        model, stored = parallel.model(net()), {}
        optimizer = sgd(model)

        @parallel.step
        def step(batch):
            for key, param in inner(model).named_parameters():
                if key in stored:
                    param.data.mul_(0.5).add_(stored[key].detach(), alpha=0.5)
            loss = update(model, optimizer, batch)
            stored.update({key: keep(param) for key, param in inner(model).named_parameters()})
            return loss

        results = [step(parallel.batch(call)) for call in range(CALLS)]
        return results, state(model), [whole(value) for value in stored.values()]

    LOOPS[name] = run


storing("storing_data", lambda param: param.data)
storing("storing_gradients", lambda param: param.grad)


# -- gradients with a graph, which DDP does not support: the reference averages by hand


def with_graph(body: Callable[..., Any], make: Callable[[Any], Any] = sgd) -> None:
    def run(parallel: Any) -> Any:
        model = net()
        optimizer = make(model)
        if isinstance(parallel, ByEngine):
            step = parallel.step(body)
            return [step(model, optimizer, parallel.batch(call), list) for call in range(CALLS)], state(model)
        for param in model.parameters():
            dist.broadcast(param.data, 0)

        def average():
            for param in model.parameters():
                dist.all_reduce(param.grad.detach())
                param.grad.detach().div_(dist.get_world_size())

        return [body(model, optimizer, parallel.batch(call), average) for call in range(CALLS)], state(model)

    LOOPS[body.__name__] = run


def graph_of_gradients(model, optimizer, batch, average):
    optimizer.zero_grad()
    loss = error(model, batch)
    loss.backward(create_graph=True)
    average()
    optimizer.step()
    return loss.detach()


def graph_that_accumulates(model, optimizer, batch, average):
    loss = error(model, batch)
    loss.backward(create_graph=True)
    average()
    optimizer.step()
    return loss.detach()


def graph_zeroed_in_place(model, optimizer, batch, average):
    optimizer.zero_grad(set_to_none=False)
    loss = error(model, batch)
    loss.backward(create_graph=True)
    average()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm.detach()


def penalty_of_gradients(model, optimizer, batch, average):
    optimizer.zero_grad()
    error(model, batch).backward(create_graph=True)
    average()
    penalty = sum(param.grad.pow(2).sum() for param in model.parameters())
    optimizer.zero_grad()
    penalty.backward()
    average()
    optimizer.step()
    return penalty.detach()


for each in (graph_of_gradients, graph_that_accumulates, graph_zeroed_in_place, penalty_of_gradients):
    with_graph(each)


class Twins(nn.Module):
    """Two layers of one shape, of which gradients may be shared."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.a(x)) + torch.tanh(self.b(x)))


@aliasing
def gradients_shared_after_the_backward(parallel):
    model = parallel.model(Twins())
    optimizer = momentum(model)

    @parallel.step
    def step(batch):
        optimizer.zero_grad()
        loss = error(model, batch)
        loss.backward()
        inner(model).b.weight.grad = inner(model).a.weight.grad
        optimizer.step()
        return loss.detach()

    return [step(parallel.batch(call)) for call in range(CALLS)], state(model)


@aliasing
def gradients_in_one_vector(parallel):
    """Each gradient has a part of the memory of its own."""
    model = parallel.model(net())
    optimizer, vector = sgd(model), torch.zeros(sum(param.numel() for param in model.parameters()))

    @parallel.step
    def step(batch):
        vector.zero_()
        parts = vector.split([param.numel() for param in model.parameters()])
        for param, part in zip(model.parameters(), parts, strict=True):
            param.grad = part.view(param.shape)
        loss = error(model, batch)
        loss.backward()
        norm = vector.norm()
        optimizer.step()
        return loss.detach(), norm

    return [step(parallel.batch(call)) for call in range(CALLS)], state(model)


# -- kept outside of the step


def kept(take: Callable[[Any], list[torch.Tensor]], name: str, calls_before: int) -> None:
    """Register a loop that looks, after each call, at what `take` has taken of the model after some calls."""

    def run(parallel: Any) -> Any:
        model = parallel.model(net())
        optimizer = momentum(model)
        compiled = parallel.step(update)
        results, tensors = [], []
        for call in range(CALLS):
            if call == calls_before:
                tensors = take(inner(model))
            results.append(compiled(model, optimizer, parallel.batch(call)))
            results.append([whole(tensor) for tensor in tensors])
        return results, state(model)

    LOOPS[name] = run


def parameters(model):
    return [*model.parameters()]


def detached(model):
    return [param.detach() for param in model.parameters()]


def rows(model):
    return [param.detach()[0] for param in model.parameters()]


def data_in_other_shapes(model):
    return [param.data.view(-1) for param in model.parameters()]


for each in (parameters, detached, rows, data_in_other_shapes):
    for before in (0, 1):
        kept(each, f"{each.__name__}_kept_{'between_calls' if before else 'before_the_first_call'}", before)


@aliasing
def averaging_a_kept_list(parallel):
    """Parameters that were listed before the first call are averaged, scaled, read and printed between calls."""
    model = parallel.model(net())
    listed, names = [*model.parameters()], {param: name for name, param in inner(model).named_parameters()}
    optimizer, averages, results = momentum(model), [], []

    @parallel.step
    def step(batch):
        optimizer.zero_grad()
        loss = error(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(listed, 0.5)
        optimizer.step()
        return loss.detach(), norm

    for call in range(CALLS):
        results.append(step(parallel.batch(call)))
        averages = averages or [param.detach().clone() for param in listed]
        with torch.no_grad():
            for average, param in zip(averages, listed, strict=True):
                average.lerp_(param, 0.1)
                param.mul_(0.99)
                printed = float(f"{param.sum():.9f}"), len(repr(param)) > 0
                results.append((names[param], param.shape, param.grad.norm(), printed))
    return results, state(model), [whole(average) for average in averages]
