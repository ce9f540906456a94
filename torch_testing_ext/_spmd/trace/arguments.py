"""Reading a call's arguments quickly: leaves, and a signature that tells whether a known program fits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch import tree

from ..errors import SPMDError

_tree = tree()


def flatten(value: Any, leaves: list[Any], shape: list[Any]) -> None:
    """Append the leaves of `value` in pytree's order, and what it takes to tell its structure from another's.

    Pytree itself would take longer than everything else that happens between two calls.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        shape.append((kind, len(value)))
        for item in value:
            flatten(item, leaves, shape)
    elif kind is dict:
        shape.append(tuple(value))
        for item in value.values():
            flatten(item, leaves, shape)
    elif kind in _tree.SUPPORTED_NODES:
        more, spec = _tree.tree_flatten(value)
        shape.append(spec)
        leaves.extend(more)
    else:
        leaves.append(value)


def signature(leaves: list[Any], shape: list[Any]) -> tuple[Any, ...]:
    keys: list[Any] = list(shape)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            keys.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
        elif leaf is None or isinstance(leaf, (bool, int, float, str, complex, torch.dtype, torch.device)):
            keys.append((type(leaf), leaf))
        else:
            keys.append(id(leaf))  # modules, optimizers, and objects the step keeps to itself
    return tuple(keys)


def validate(leaves: list[Any], batch_dim: int) -> None:
    """Refuse inputs that a traced step could not take; asked only where a signature is new."""
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, (nn.Module, Optimizer)):
            continue
        if isinstance(leaf, DTensor):
            raise SPMDError("An input is a DTensor.", remedy="Pass this rank's batch as a plain tensor.")
        if 0 < leaf.dim() <= batch_dim:
            raise SPMDError(
                f"input_batch_dim is {batch_dim}, but an input has the shape {tuple(leaf.shape)}.",
                remedy="Give every input tensor that dim (0-d tensors may lack it), or choose another input_batch_dim.",
            )
        if leaf.requires_grad:
            raise SPMDError(
                f"An input of shape {tuple(leaf.shape)} requires a gradient, which the step would not leave on it.",
                remedy="Detach it before; within the step, x.detach().requires_grad_() and torch.autograd.grad work.",
            )


def loose_signature(leaves: list[Any], shape: list[Any], batch_dim: int) -> tuple[Any, ...]:
    """The signature without batch sizes: what one traced program may serve, if its guards hold."""
    keys: list[Any] = list(shape)
    for leaf, key in zip(leaves, signature(leaves, []), strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > batch_dim and leaf.shape[batch_dim] > 1:
            sizes = (*leaf.shape[:batch_dim], -1, *leaf.shape[batch_dim + 1 :])
            strides = "contiguous" if leaf.is_contiguous() else leaf.stride()
            key = (sizes, strides, leaf.dtype, leaf.device, leaf.requires_grad)
        keys.append(key)
    return tuple(keys)
