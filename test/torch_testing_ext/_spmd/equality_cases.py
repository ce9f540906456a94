"""Models, optimizers and kinds of step, with which compiled steps are compared with DDP."""

from __future__ import annotations

import functools

import torch
from spmd_training import (
    MLP,
    Case,
    Mixed,
    Normed,
    Recurrent,
    Tied,
    encoder,
    normal_batch,
    sum_step,
    token_batch,
    weight_normed,
)
from torch.utils.checkpoint import checkpoint

optim = torch.optim
mlp_batch = normal_batch(12, 10)


def mlp():
    return MLP((10, 8, 4))


def _case(name, optimizer, tolerance=0.0, **options):
    make = functools.partial(optimizer, **options)
    return Case(name, mlp, mlp_batch, lambda params: make(params), tolerance=tolerance, iterations=4)


OPTIMIZERS = [
    _case("sgd", optim.SGD, lr=0.1),
    _case("sgd_momentum", optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    _case("sgd_foreach", optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    _case("sgd_fused", optim.SGD, lr=0.1, momentum=0.9, fused=True, tolerance=2e-7),
    _case("sgd_tensor_lr", optim.SGD, lr=torch.tensor(0.1), momentum=0.9),
    _case("adam", optim.Adam, lr=0.1),
    _case("adam_fused", optim.Adam, lr=0.1, fused=True, tolerance=2e-7),
    _case("adamw", optim.AdamW, lr=0.1),
    _case("nadam", optim.NAdam, lr=0.1),
    _case("adagrad", optim.Adagrad, lr=0.1),
    _case("rmsprop", optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
]


def clipping_step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss, norm


def penalized_step(model, optimizer, batch):
    """The weight of the penalty differs between ranks, and its gradient must be averaged, too."""
    x, y = batch
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    penalty = sum(p.pow(2).sum() for p in model.parameters()) * x.mean()
    (loss + penalty).backward()
    optimizer.step()
    return {"loss": loss, "penalty": penalty}


def logging_step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        grads = [p.grad for p in model.parameters()]
        squares = sum(g.pow(2).sum() for g in grads)
        largest = torch.stack([g.abs().max() for g in grads]).max()
        mean = torch.stack([p.mean() for p in model.parameters()])
        finite = torch.stack([g.isfinite().all() for g in grads]).all()
        inf_norms = torch.stack([g.norm(float("inf")) for g in grads])
    return loss.item(), squares, largest, mean, finite, inf_norms


def accumulating_step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad(set_to_none=False)
    losses = []
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = (model(part) - target).pow(2).mean() / 2
        loss.backward()
        losses.append(loss)
    optimizer.step()
    return losses


def closure_step(model, optimizer, batch):
    x, y = batch

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        return loss

    return optimizer.step(closure)


def autocast_step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = model(x)
    loss = (out.float() - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def masked_step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    wrong = (model(x) - y)[y > 0]  # the size depends on the data
    loss = wrong.pow(2).sum()
    loss.backward()
    optimizer.step()
    return loss


def checkpointed_step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    loss = (checkpoint(model, x, use_reentrant=False) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def twice_step(model, optimizer, batch):
    """Two updates in one call: the second must read the weights that the first one wrote."""
    losses = []
    for x, y in zip(*(part.chunk(2) for part in batch), strict=True):
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def in_place_step(model, optimizer, batch):
    """Writes to an input and to parameters, and reads them again after the update."""
    x, y = batch
    x.mul_(2)
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)
        after = model(x)
    return loss, after, x


STEPS = [
    Case("clipping", mlp, mlp_batch, step=clipping_step, tolerance=1e-6),
    Case(
        "clipping_uneven", lambda: MLP((10, 7, 1)), normal_batch(12, 10, out=(1,)), step=clipping_step, tolerance=1e-6
    ),
    Case("penalty", mlp, mlp_batch, step=penalized_step, tolerance=1e-6),
    Case("logging", mlp, mlp_batch, step=logging_step, tolerance=1e-6),
    Case("logging_uneven", lambda: MLP((10, 7, 1)), normal_batch(12, 10, out=(1,)), step=logging_step, tolerance=1e-6),
    Case("accumulation", mlp, mlp_batch, step=accumulating_step, tolerance=1e-7),
    Case("closure", mlp, mlp_batch, step=closure_step),
    Case("autocast", mlp, mlp_batch, step=autocast_step),
    Case("boolean_mask", mlp, mlp_batch, step=masked_step),
    Case("checkpoint", mlp, mlp_batch, step=checkpointed_step),
    Case("twice", mlp, mlp_batch, step=twice_step),
    Case("in_place", mlp, mlp_batch, step=in_place_step),
    Case("sum_loss", mlp, mlp_batch, step=sum_step),
]

MODELS = [
    Case("uneven", lambda: MLP((10, 7, 1)), normal_batch(12, 10, out=(1,))),
    Case("tied", Tied, token_batch),
    Case("mixed", Mixed, normal_batch(12, 10, out=(1,))),
    Case("batch_norm", Normed, normal_batch(6, 3, 9)),
    Case("lstm", Recurrent, normal_batch(6, 5, 6), tolerance=1e-6),
    Case("weight_norm", weight_normed, normal_batch(12, 10)),
    Case("encoder", encoder, normal_batch(4, 5, 16, out=(5, 4))),
]


BY_NAME = {case.name: case for case in (*OPTIMIZERS, *STEPS, *MODELS)}
