"""Graphs: the storages that a node reads and writes, new nodes with their fake values, and markers.

Markers stand in a recorded graph where it needs the other ranks, until they are lowered. They compute nothing: each
returns a new tensor of the right shape, and only while a step is recorded.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_testing_ext._torch.spmd import storage_key, tree

_tree = tree()
# Random operations must keep their order, so the generator counts as a storage that each of them reads and writes.
GENERATOR = -1


def call(graph: fx.Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    if not isinstance(target, torch._ops.OpOverload) or target._schema.returns:
        refresh(node)
    return node


def refresh(node: fx.Node) -> None:
    """Compute the fake value of `node` from those of its arguments."""
    target: Any = node.target
    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), _fake_value)
    modes = [leaf.fake_mode for leaf in _tree.tree_leaves((args, kwargs)) if hasattr(leaf, "fake_mode")]
    mode = modes[0] if modes else contextlib.nullcontext()
    with mode, torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)


def _fake_value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def storages(node: fx.Node) -> set[int]:
    """The memory of the value of a node."""
    leaves = _tree.tree_leaves(node.meta.get("val"))
    return {storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}


def reads(node: fx.Node) -> set[int]:
    """The memory of the arguments of a node."""
    of_arguments: set[int] = set().union(*map(storages, node.all_input_nodes))
    return of_arguments | {GENERATOR} if _draws(node) else of_arguments


def writes(node: fx.Node) -> set[int]:
    """The memory of the arguments that a node writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return set()
    written = {GENERATOR} if _draws(node) else set()
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            for leaf in _tree.tree_leaves(given):
                if isinstance(leaf, fx.Node):
                    written |= storages(leaf)
    return written


def _draws(node: fx.Node) -> bool:
    """Does an operation draw random numbers? Attention, for example, does so only with dropout."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            if position < len(node.args):
                return bool(node.args[position] != 0)
            return bool(node.kwargs.get("dropout_p", argument.default_value) != 0)
    return True


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional" and "wait_tensor" not in str(node.target)


def param_of(marker: fx.Node) -> int:
    return marker.args[1]  # type: ignore[return-value]


def operand(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


_new_library: Any = torch.library.Library  # untyped in torch
_library = _new_library("torch_testing_ext_spmd", "FRAGMENT")


def _define(name: str, arguments: str) -> Any:
    _library.define(f"{name}({arguments}) -> Tensor")
    _library.impl(name, lambda tensor, _param, shape: tensor.new_empty(shape), "Meta")
    return getattr(torch.ops.torch_testing_ext_spmd, name).default


# Each takes a tensor, the number of its parameter, and the shape of the result.
AVERAGE = _define("average", "Tensor grad, int param, int[] shape")  # the mean of a gradient over ranks
SCATTER = _define("scatter", "Tensor grad, int param, int[] shape")  # this rank's rows of the mean
GATHER = _define("gather", "Tensor rows, int param, int[] shape")  # the whole tensor of all ranks' rows
ROWS = _define("rows", "Tensor whole, int param, int[] shape")  # this rank's rows
