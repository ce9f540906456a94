"""Steps that see whole parameters: they ask for sizes, write to parameters, and compute across rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from spmd_training import MLP, Case, normal_batch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


def mlp():
    return MLP((10, 7, 4))


def plain(model):
    """The module inside DDP's wrapper."""
    return getattr(model, "module", model)


def backward(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    return loss


def clamping(model, optimizer, batch):
    loss = backward(model, optimizer, batch)
    optimizer.step()
    with torch.no_grad():
        plain(model).layers[0].weight.clamp_(-0.1, 0.1)
    return loss


def writing_before(model, optimizer, batch):
    layers = plain(model).layers
    layers[0].weight.data.mul_(0.9)
    layers[1].weight.data[1].zero_()
    layers[1].bias.data[0] = 0.5
    with torch.no_grad():
        layers[0].weight.t()[2:4].add_(0.1)
    loss = backward(model, optimizer, batch)
    optimizer.step()
    return loss


def normalizing(model, optimizer, batch):
    with torch.no_grad():
        weight = plain(model).layers[0].weight
        weight.copy_(F.normalize(weight, dim=1))
    loss = backward(model, optimizer, batch)
    optimizer.step()
    with torch.no_grad():
        nn.init.ones_(plain(model).layers[1].bias)
        weight.div_(weight.norm(dim=1, keepdim=True))
    return loss


def reading_an_old_reference(model, optimizer, batch):
    weight = plain(model).layers[0].weight
    view, before = weight.detach().t(), weight.detach().clone()
    loss = backward(model, optimizer, batch)
    optimizer.step()
    return loss, (weight - before).norm(), view.sum(0), weight.grad is plain(model).layers[0].weight.grad


def module_gradients(model, optimizer, batch):
    loss = backward(model, optimizer, batch)
    grad = plain(model).layers[0].weight.grad
    norm = grad.norm()
    grad.mul_(0.5)
    plain(model).layers[1].weight.grad[0] = 0.1
    optimizer.step()
    return loss, norm, grad


def sizes(model, optimizer, batch):
    loss = backward(model, optimizer, batch)
    for p in model.parameters():
        p.grad.div_(p.grad.norm() / math.sqrt(p.numel()) + 0.1)
        p.grad.mul_(1 / p.shape[0]).add_(torch.ones(p.shape), alpha=0.01)
    optimizer.step()
    return loss, [(p.numel(), len(p), p.size()) for p in model.parameters()]


def masking(model, optimizer, batch):
    loss = backward(model, optimizer, batch)
    for p in model.parameters():
        p.grad.mul_((torch.arange(p.numel()).view(p.shape) % 2).float())
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.masked_fill_(torch.arange(p.shape[0]).view(-1, *[1] * (p.dim() - 1)) == 1, 0.25)
    return loss


def changed_weights(model, optimizer, batch):
    loss = backward(model, optimizer, batch)
    half = {name: p.detach() * 0.5 for name, p in plain(model).named_parameters()}
    other = torch.func.functional_call(plain(model), half, (batch[0],)).sum()
    optimizer.step()
    return loss, other


def types(model, optimizer, batch):
    linear = [m for m in model.modules() if type(m) is nn.Linear]
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean() + sum(m.weight.pow(2).sum() for m in linear) * batch[0].mean()
    loss.backward()
    optimizer.step()
    return loss, len(linear)


def across_rows(model, optimizer, batch):
    loss = backward(model, optimizer, batch)
    optimizer.step()
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(model.parameters())
        ordered = [p.grad.flatten().sort()[0] for p in model.parameters()]
        means = [p.mean(dim=0) for p in model.parameters()]
        first = [p.flatten()[:3].clone() for p in model.parameters()]
    return loss, vector, ordered, means, first, plain(model).layers[0].weight.std()


def totals(model, optimizer, batch):
    loss = backward(model, optimizer, batch)
    total, largest, zeros = torch.zeros(()), torch.tensor(-1.0), torch.zeros((), dtype=torch.int64)
    for p in model.parameters():
        total.add_(p.grad.pow(2).sum())
        largest = torch.maximum(largest, p.grad.abs().max())
        zeros += (p.grad == 0).sum()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()
    return loss, total.sqrt(), largest, zeros


def unscaling(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    (loss * 4).backward()
    found = torch.zeros(1)
    grads = [p.grad for p in model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.25))
    optimizer.step()
    return loss, found


def gradient_penalty(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + 0.1 * sum(grad.pow(2).sum() for grad in grads)).backward()
    optimizer.step()
    return loss


def orthogonal_penalty(model, optimizer, batch):
    weight = plain(model).layers[0].weight
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean() + (weight @ weight.t() - torch.eye(7)).pow(2).sum()
    loss.backward()
    optimizer.step()
    return loss


def plain_step(model, optimizer, batch):
    loss = backward(model, optimizer, batch)
    optimizer.step()
    return loss


class RowWise(torch.optim.Optimizer):
    """Keeps states of other shapes than the parameter's, and multiplies matrices in its update."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["rows"], state["momentum"] = torch.zeros(p.shape[0]), torch.zeros(p.shape)
            state["rows"].add_(p.grad.pow(2).flatten(1).mean(1) if p.dim() > 1 else p.grad.pow(2))
            state["momentum"].lerp_(p.grad, 0.1)
            update = state["momentum"]
            if p.dim() == 2:
                update = (update @ update.t() / (update.norm() + 1)) @ update
            scale = state["rows"].sqrt().add(1).view(-1, *[1] * (p.dim() - 1))
            p.sub_(0.1 * update / scale)


class Odd(nn.Module):
    """Parameters of one row, of no rows, and of one dimension that scales the input."""

    def __init__(self):
        super().__init__()
        self.row, self.empty = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(0, 3))
        self.scale, self.layer = nn.Parameter(torch.randn(10)), nn.Linear(10, 4)

    def forward(self, x):
        return self.layer(x * self.scale) * self.row + self.empty.sum()


def spectral():
    return nn.Sequential(spectral_norm(nn.Linear(10, 7)), nn.Linear(7, 4))


def _case(step, model=mlp, tolerance=0.0, **options):
    return Case(step.__name__, model, normal_batch(6, 10), step=step, tolerance=tolerance, **options)


CASES = {
    case.name: case
    for case in (
        _case(clamping),
        _case(writing_before),
        _case(normalizing),
        _case(reading_an_old_reference, tolerance=1e-6),
        _case(module_gradients, tolerance=1e-6),
        _case(sizes, tolerance=1e-5),
        _case(masking),
        _case(changed_weights),
        _case(types),
        _case(across_rows, tolerance=1e-6),
        _case(totals, tolerance=1e-6),
        _case(unscaling),
        _case(gradient_penalty),
        _case(orthogonal_penalty),
    )
}
OTHERS = {
    "row_wise": _case(plain_step, optimizer=lambda params: RowWise(params), tolerance=1e-6),
    "muon": _case(plain_step, lambda: nn.Linear(10, 4, bias=False), optimizer=lambda p: torch.optim.Muon(p, lr=0.1)),
    "odd": _case(plain_step, Odd, optimizer=lambda params: torch.optim.AdamW(params, lr=0.1)),
    "odd_totals": _case(totals, lambda: MLP((10, 1, 4)), tolerance=1e-6),
    "spectral": _case(plain_step, spectral),
}
