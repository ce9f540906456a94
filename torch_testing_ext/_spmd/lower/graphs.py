"""Helpers for graphs: the storages that a node reads and writes, and new nodes with their fake values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_testing_ext._torch.spmd import python_dispatcher, storage_key, tree

from ..trace.trace_modes import draws, written_arguments

_tree = tree()
# Random operations must keep their order, so the generator counts as a storage that each of them reads and writes.
_GENERATOR = -1


def call(graph: fx.Graph, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a new node with its fake value; it takes its source line and phase (forward, backward) from `like`."""
    node = graph.call_function(target, args, kwargs)
    for key in ("where", "backward"):
        node.meta[key] = like.meta.get(key)
    if not isinstance(target, torch._ops.OpOverload) or target._schema.returns:
        refresh(node)
    return node


def refresh(node: fx.Node) -> None:
    """Compute the fake value of `node` from those of its arguments."""
    target: Any = node.target
    values = fx.node.map_aggregate((node.args, node.kwargs), lambda a: _value_for(a) if isinstance(a, fx.Node) else a)
    mode = next((v.fake_mode for v in _tree.tree_leaves(values) if hasattr(v, "fake_mode")), contextlib.nullcontext())
    # Operations composed of others need the dispatcher of the trace to work on symbolic sizes.
    with mode, torch.no_grad(), python_dispatcher():
        node.meta["val"] = target(*values[0], **values[1])


def _value_for(node: fx.Node) -> Any:
    return node.meta.get("number", node.meta.get("val"))  # an input that is a number has a tensor as its fake value


def storages(node: fx.Node) -> set[int]:
    """The storages of the node's own value."""
    return {storage_key(leaf) for leaf in _tree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)}


def reads(node: fx.Node) -> set[int]:
    """The storages that the node may read."""
    found: set[int] = set().union(*(storages(arg) for arg in node.all_input_nodes))
    return found | ({_GENERATOR} if _draws(node) else set())


def writes(node: fx.Node) -> set[int]:
    """The storages that the node writes."""
    found = {_GENERATOR} if _draws(node) else set()
    if isinstance(node.target, torch._ops.OpOverload):
        for written in written_arguments(node.target, node.args, node.kwargs):
            for leaf in _tree.tree_leaves(written):
                if isinstance(leaf, fx.Node):
                    found |= storages(leaf)
    return found


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and draws(node.target, node.args, node.kwargs)


def is_operation(node: fx.Node) -> bool:
    """Whether a node calls an operation of the dispatcher, with a schema."""
    return isinstance(node.target, torch._ops.OpOverload)


def is_view(node: fx.Node) -> bool:
    """Whether the value of the node shares memory with an argument that the node does not write."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = [r.alias_info for r in node.target._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def nbytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def param_of(marker: fx.Node) -> int:
    """The index of the parameter that a marker belongs to."""
    param = marker.args[1]
    assert isinstance(param, int)
    return param


def operand(node: fx.Node) -> fx.Node:
    """The first argument, which must be a node."""
    found = node.args[0]
    assert isinstance(found, fx.Node)
    return found
