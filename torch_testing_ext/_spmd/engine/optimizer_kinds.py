"""Tells the optimizers that may run on a rank's rows: each element of their updates depends on that element alone."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from torch_testing_ext._torch.spmd import optimizer_has_hooks

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adamax"]
)


def why_whole(optimizer: Optimizer) -> str | None:
    """Why an optimizer must run on whole tensors; None if it may run on rows."""
    if type(optimizer) not in _ELEMENTWISE:
        return "it is none of torch's elementwise optimizers"
    if optimizer_has_hooks(optimizer):
        return "it has hooks, which see whole parameters"
    inner = optimizer.__dict__.get("step")
    if inner is not None and not hasattr(inner, "_wrapped_by_lr_sched"):
        return "its step has been replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "it is differentiable"
    return None
