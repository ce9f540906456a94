"""Fast processing of a call's arguments: their leaves, and a signature that identifies the matching program."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch.spmd import tree

from ..spmd_errors import SPMDError

_tree = tree()
_PLAIN = (type(None), bool, int, float, str, complex, torch.dtype, torch.device)
_LEAVES = (torch.Tensor, nn.Module, Optimizer, *_PLAIN)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a tuple of them: nothing that can change in place."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(is_plain, value)))


def flatten_arguments(value: Any, leaves: list[Any], shape: list[Any]) -> None:
    """Append the leaves of `value` to `leaves`, and a description of its structure to `shape`.

    Pytree itself takes longer than all other work of a call outside of the graph.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        shape.append((kind, len(value)))
        for item in value:
            flatten_arguments(item, leaves, shape)
    elif kind is dict:
        shape.append((*value, *map(type, value)))  # True is equal to 1
        for item in value.values():
            flatten_arguments(item, leaves, shape)
    elif kind is torch.Tensor or isinstance(value, _LEAVES):
        leaves.append(value)
    elif kind in _tree.SUPPORTED_NODES:
        items, context = _tree.SUPPORTED_NODES[kind].flatten_fn(value)
        shape.append((kind, len(items), _comparable(context)))
        for item in items:
            flatten_arguments(item, leaves, shape)
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        shape.append((kind, len(value)))
        for item in value:
            flatten_arguments(item, leaves, shape)
    elif is_record(value):
        attributes = attributes_of_record(value)
        shape.append((kind, *attributes))
        for item in attributes.values():
            flatten_arguments(item, leaves, shape)
    else:
        leaves.append(value)


def rebuild_arguments(value: Any, leaves: Iterator[Any]) -> Any:
    """A copy of `value` with other leaves, in the order of `flatten_arguments`."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(rebuild_arguments(item, leaves) for item in value)
    if kind is dict:
        return {key: rebuild_arguments(item, leaves) for key, item in value.items()}
    if isinstance(value, _LEAVES):
        return next(leaves)
    if kind in _tree.SUPPORTED_NODES:
        node = _tree.SUPPORTED_NODES[kind]
        items, context = node.flatten_fn(value)
        return node.unflatten_fn([rebuild_arguments(item, leaves) for item in items], context)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return tuple.__new__(kind, [rebuild_arguments(item, leaves) for item in value])
    if is_record(value):
        attributes = attributes_of_record(value)
        rebuilt = copy.copy(value)
        for name, item in attributes.items():
            object.__setattr__(rebuilt, name, rebuild_arguments(item, leaves))
        return rebuilt
    return next(leaves)


def is_record(value: Any) -> bool:
    """Whether an object is nothing but its attributes."""
    if dataclasses.is_dataclass(value):
        return not isinstance(value, (type, dict, list, tuple, set))
    return isinstance(value, (types.SimpleNamespace, collections.UserDict, collections.UserList))


def attributes_of_record(value: Any) -> dict[str, Any]:
    """The attributes of such an object, in slots or not."""
    slots = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _comparable(context: Any) -> Any:
    """The data that pytree keeps of a node besides its items, as something that supports comparison and hashing."""
    try:
        hash(context)
    except TypeError:
        return repr(context)
    return context


def call_signature(leaves: list[Any], shape: list[Any]) -> tuple[Any, ...]:
    """Everything about a call's arguments that a program depends on, as a hashable key."""
    keys: list[Any] = list(shape)
    if len({*map(id, leaves)}) != len(leaves):
        keys.append(first_of_same(leaves))
    keys += _keys_of(leaves)
    return tuple(keys)


def _keys_of(leaves: list[Any]) -> list[Any]:
    keys: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
            keys.append((type(leaf), leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad, _marks(leaf)))
        elif type(leaf) in _PLAIN or (type(leaf).__module__ == "numpy" and isinstance(leaf, (float, complex, str))):
            keys.append((type(leaf), leaf or str(leaf)))  # zeros of both signs are equal
        else:
            keys.append(id(leaf))  # modules, optimizers, and opaque objects
    return keys


def _marks(tensor: torch.Tensor) -> Any:
    """Rare properties of a tensor: names of attributes that users gave it, the lazy conjugation of complex numbers."""
    return (*tensor.__dict__, tensor.is_conj()) if tensor.__dict__ or tensor.is_complex() else None


def first_of_same(leaves: list[Any]) -> tuple[int, ...]:
    """For each leaf that is a tensor, the first position of the same tensor; otherwise its own position."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(v), i) if isinstance(v, torch.Tensor) else i for i, v in enumerate(leaves))


def validate_inputs(leaves: list[Any], batch_dim: int) -> None:
    """Refuse inputs that a traced step cannot take. Runs only for new signatures."""
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, (nn.Module, Optimizer)):
            continue
        if isinstance(leaf, DTensor):
            raise SPMDError("An input is a DTensor.", remedy="Pass this rank's batch as a plain tensor.")
        if type(leaf) not in (torch.Tensor, nn.Parameter):
            raise SPMDError(
                f"An input is a {type(leaf).__name__}, a subclass of torch.Tensor, which a trace cannot follow.",
                remedy="Pass a plain tensor: x.as_subclass(torch.Tensor).",
            )
        if 0 < leaf.dim() <= batch_dim:
            raise SPMDError(
                f"input_batch_dim is {batch_dim}, but an input has shape {tuple(leaf.shape)}.",
                remedy="Give every input tensor (except 0-d ones) this dimension, or choose another input_batch_dim.",
            )
        if leaf.layout is not torch.strided:
            raise SPMDError(
                f"An input of shape {tuple(leaf.shape)} is sparse.",
                remedy="Pass a dense tensor (to_dense()), or its indices and values as two tensors.",
            )
        if leaf.requires_grad:
            raise SPMDError(
                f"An input of shape {tuple(leaf.shape)} requires a gradient, but the compiled step does not set it.",
                remedy="Detach it first; in the step, x.detach().requires_grad_() and torch.autograd.grad work.",
            )


def signature_without_batch_sizes(leaves: list[Any], shape: list[Any], batch_dim: int) -> tuple[Any, ...]:
    """The signature without batch sizes. One program serves all calls with the same key if its guards hold."""
    keys: list[Any] = [*shape, first_of_same(leaves)]
    for leaf, key in zip(leaves, _keys_of(leaves), strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > batch_dim and leaf.shape[batch_dim] > 1:
            sizes = (*leaf.shape[:batch_dim], -1, *leaf.shape[batch_dim + 1 :])
            strides = "contiguous" if leaf.is_contiguous() else leaf.stride()
            key = (type(leaf), sizes, strides, leaf.dtype, leaf.device, leaf.requires_grad, _marks(leaf))
        keys.append(key)
    return tuple(keys)
