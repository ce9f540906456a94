"""Removal of nodes that only the trace needed: detaches, profiler records, pairs of transposes, dead code."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..trace.markers import GRAD_SYNC
from ..trace.tracing import TracedStep
from .graphs import storages

aten = torch.ops.aten
_SAME_TENSOR = {aten.detach.default, aten.alias.default}
_EFFECT_NAMESPACES = ("_c10d_functional", "torch_testing_ext_spmd")


def clean(
    traced: TracedStep, lr_groups: dict[int, list[tuple[int, int]]], lr_values: dict[tuple[int, int], Any]
) -> set[tuple[int, int]]:
    """Clean `traced.graph` in place, and return the groups whose learning rate is a constant in it.

    `lr_groups` maps each parameter to its groups, one for each optimizer that has it, and `lr_values` maps each group
    to its current learning rate.
    """
    graph = traced.graph.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _SAME_TENSOR:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default and _is_t(node.args[0]):
            node.replace_all_uses_with(node.args[0].args[0])
        elif node.target is aten.copy_.default:
            _remove_copy_of_gradient(node)
    constant = _lift_learning_rates(traced, lr_groups, lr_values)
    remove_dead_code(graph)
    return constant


def _remove_copy_of_gradient(copy: fx.Node) -> None:
    """Use a gradient itself where autograd has copied it to a new tensor, and nothing else uses it.

    autograd does that whenever somebody refers to the gradient, if only another thread that looks at the stack: such a
    copy would make this rank's program another one.
    """
    new, grad = copy.args[:2]
    assert isinstance(new, fx.Node)
    if new.target is not aten.new_empty_strided.default or {*new.users} != {copy} or new.args[0] is not grad:
        return
    assert isinstance(grad, fx.Node)
    kept = copy.meta["val"]
    if grad.target is GRAD_SYNC and {*grad.users} == {new, copy} and grad.meta["val"].stride() == kept.stride():
        copy.replace_all_uses_with(grad)
        grad.meta["val"] = kept  # later nodes have this storage
        copy.graph.erase_node(copy)


def _is_t(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.t.default


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _lift_learning_rates(
    traced: TracedStep, lr_groups: dict[int, list[tuple[int, int]]], lr_values: dict[tuple[int, int], Any]
) -> set[tuple[int, int]]:
    source_of = dict(zip(placeholders(traced.graph.graph), traced.sources, strict=True))
    lr_node = {(s.i, s.j): node for node, s in source_of.items() if s.kind == "lr"}
    # The rate of a group without an input is a constant in the graph (see `trace_step`: data-dependent optimizers).
    constant = {group for group, lr in lr_values.items() if isinstance(lr, float) and group not in lr_node}
    for group, node in lr_node.items():
        if isinstance(lr_values[group], float):
            for user in list(node.users):
                if user.target is aten._local_scalar_dense.default:
                    node.meta["number"] = user.meta["val"]
                    user.replace_all_uses_with(node)
    param_in = {key: s.i for node, s in source_of.items() if s.kind == "param" for key in storages(node)}
    for node in traced.graph.graph.nodes:
        if not _is_fused(node) or not isinstance(node.kwargs.get("lr"), float):
            continue
        # The step may have written to the parameter before: the memory tells which one it is.
        params = {param_in[key] for key in storages(node.args[0][0]) if key in param_in}
        groups = [group for param in params for group in lr_groups.get(param, [])]
        fitting = [group for group in groups if node.kwargs["lr"] == lr_values[group]]
        if len(fitting) == 1 and fitting[0] in lr_node:
            node.update_kwarg("lr", lr_node[fitting[0]])
        else:  # two optimizers with the same rate, or a rate that the step computed
            constant.update(groups or lr_values)
    return constant


def _is_fused(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("aten._fused_") and bool(node.args)


def remove_dead_code(graph: fx.Graph) -> None:
    """Erase nodes without users and effects, in place."""
    for node in reversed(graph.nodes):
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """Whether a node must stay even if no other node uses its value."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.op in ("call_module", "call_method") or (
            node.op == "call_function" and not _is_arithmetic(node.target)
        )
    target = node.target
    if target.namespace == "profiler":
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return True
    return target.namespace in _EFFECT_NAMESPACES or "assert" in target._schema.name


def _is_arithmetic(target: Any) -> bool:
    return target is operator.getitem or getattr(target, "__module__", "") in ("_operator", "math", "torch")
