"""Taking out of a traced graph what only the trace needed: detaches, records, pairs of transposes, dead code."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..trace.tracing import Source, Traced

aten = torch.ops.aten
_SAME_TENSOR = {aten.detach.default, aten.alias.default}
_EFFECT_NAMESPACES = ("_c10d_functional", "torch_testing_ext_spmd")


def clean(
    traced: Traced, lr_groups: dict[int, tuple[int, int]], lr_values: dict[tuple[int, int], Any]
) -> set[tuple[int, int]]:
    """Clean `traced.graph` in place; the groups whose learning rate became a constant of it.

    `lr_groups` tells the group of each parameter, `lr_values` the rate each group has at the moment.
    """
    graph = traced.graph.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _SAME_TENSOR:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default and _is_t(node.args[0]):
            node.replace_all_uses_with(node.args[0].args[0])
    baked = _lift_learning_rates(traced, lr_groups, lr_values)
    remove_dead_code(graph)
    return baked


def _is_t(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.t.default


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _lift_learning_rates(
    traced: Traced, lr_groups: dict[int, tuple[int, int]], lr_values: dict[tuple[int, int], Any]
) -> set[tuple[int, int]]:
    source_of = dict(zip(placeholders(traced.graph.graph), traced.sources, strict=True))
    lr_node = {(s.i, s.j): node for node, s in source_of.items() if s.kind == "lr"}
    # A group without an input of its own has its rate in the graph (a data-dependent optimizer traced again).
    baked = {group for group, lr in lr_values.items() if isinstance(lr, float) and group not in lr_node}
    for group, node in lr_node.items():
        if isinstance(lr_values[group], float):
            for user in list(node.users):
                if user.target is aten._local_scalar_dense.default:
                    user.replace_all_uses_with(node)
    for node in traced.graph.graph.nodes:
        if not _is_fused(node) or not isinstance(node.kwargs.get("lr"), float):
            continue
        first: Source = source_of[node.args[0][0]]
        group = lr_groups[first.i]
        if group in lr_node and node.kwargs["lr"] == lr_values[group]:
            node.update_kwarg("lr", lr_node[group])
        else:
            baked.add(group)
    return baked


def _is_fused(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("aten._fused_") and bool(node.args)


def remove_dead_code(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
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
