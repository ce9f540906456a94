"""Removal of nodes that only the recording needed: detaches, pairs of transposes, copies, dead code and dead writes."""

import operator

import torch
from torch import fx

from .graphs import GATHER, GENERATOR, ROWS, is_collective, operand, reads, storages, writes

aten = torch.ops.aten
_ARITHMETIC = ("_operator", "math", "torch")
_SAME_TENSOR = {aten.detach.default, aten.alias.default}


def clean(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in _SAME_TENSOR:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default and operand(node).target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
        elif node.target is aten.copy_.default:
            _remove_copy_of_gradient(node)
        elif node.target is aten._local_scalar_dense.default and operand(node).op == "placeholder":
            _use_number(node)
    _remove_needless_pushes(graph)
    remove_dead_code(graph, with_writes=True)
    _use_known_rows(graph)
    remove_dead_code(graph, with_writes=True)


def _use_number(read: fx.Node) -> None:
    """Let an input that is only read as a number be that number: a learning rate."""
    source = operand(read)
    if {*source.users} == {read} and source.meta.get("is_number"):
        source.meta["val"] = read.meta["val"]
        read.replace_all_uses_with(source)


def _remove_copy_of_gradient(copy: fx.Node) -> None:
    """Use a gradient itself where autograd has copied it to a new tensor, and nothing else uses it."""
    new, grad = copy.args[:2]
    assert isinstance(new, fx.Node)
    is_copy_to_new = new.target is aten.new_empty_strided.default and new.args[0] is grad
    if not is_copy_to_new or set(new.users) != {copy}:
        return
    assert isinstance(grad, fx.Node)
    kept = copy.meta["val"]
    has_other_users = set(grad.users) != {new, copy}
    if has_other_users or grad.meta["val"].stride() != kept.stride() or not _is_own(grad):
        return
    copy.replace_all_uses_with(grad)
    copy.graph.erase_node(copy)
    copy.graph.erase_node(new)
    # Later nodes have this storage.
    grad.meta["val"] = kept


def _is_own(node: fx.Node) -> bool:
    return node.op == "call_function" and not any(storages(node) & storages(arg) for arg in node.all_input_nodes)


def _remove_needless_pushes(graph: fx.Graph) -> None:
    """Do not copy a whole parameter back to its rows if nothing has written to it since it was gathered."""
    written: set[int] = set()
    for node in list(graph.nodes):
        value = node.args[1] if node.target is aten.copy_.default else None
        if not isinstance(value, fx.Node):
            written |= writes(node)
        elif value.target is GATHER:
            written -= storages(operand(node))
        elif value.target is ROWS:
            whole = storages(operand(value))
            if not whole & written:
                node.replace_all_uses_with(operand(node))
                graph.erase_node(node)
            written -= whole
        else:
            written |= writes(node)


def _use_known_rows(graph: fx.Graph) -> None:
    """Replace the rows of a gathered tensor that nothing has written by the rows that it was gathered from."""
    written = set().union(*map(writes, graph.nodes))
    for node in list(graph.nodes):
        if node.target is not ROWS:
            continue
        whole = operand(node)
        if whole.target is GATHER and not storages(whole) & written:
            node.replace_all_uses_with(operand(whole))


def remove_dead_code(graph: fx.Graph, with_writes: bool = False) -> None:
    """Erase nodes without users and effects, in place; also writes to memory that nothing reads any more."""
    live = lasting_storages(graph) if with_writes else None
    for node in reversed(graph.nodes):
        if not node.users and not _has_effect(node, live):
            graph.erase_node(node)
        elif live is not None:
            live |= reads(node)


def lasting_storages(graph: fx.Graph) -> set[int]:
    """The memory that a program shares with others: its inputs, captured tensors, the random generator."""
    given = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    return {GENERATOR}.union(*map(storages, given))


def _has_effect(node: fx.Node, live: set[int] | None) -> bool:
    """Must a node stay even if no other node uses its value?"""
    if node.op != "call_function":
        return node.op in ("placeholder", "output", "call_module", "call_method")
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem and getattr(node.target, "__module__", "") not in _ARITHMETIC
    target = node.target
    if target.namespace == "profiler":
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return True
    if target._schema.is_mutable:
        return live is None or bool(writes(node) & live)
    return is_collective(node) or "assert" in target._schema.name
