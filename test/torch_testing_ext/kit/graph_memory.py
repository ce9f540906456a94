"""`peak_bytes`: the peak memory of a graph's values, computed from the graph alone."""

from __future__ import annotations

import torch
from torch import fx

from torch_testing_ext._torch.spmd import storage_key, tree

_tree = tree()


def peak_bytes(graph: fx.Graph) -> int:
    """The most bytes alive at once besides the inputs, if each storage is freed after its last use."""
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    first: dict[int, int] = {}
    inputs: set[int] = set()
    for position, node in enumerate(graph.nodes):
        for used in (node, *node.all_input_nodes):
            for key, nbytes in _storages(used).items():
                last[key] = position
                size[key] = nbytes
                first.setdefault(key, position)
        if node.op == "placeholder":
            inputs |= _storages(node).keys()
    changes = [0] * (len(graph.nodes) + 1)
    for key in size.keys() - inputs:
        changes[first[key]] += size[key]
        changes[last[key] + 1] -= size[key]
    peak = live = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _storages(node: fx.Node) -> dict[int, int]:
    found = {}
    for leaf in _tree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor):
            nbytes = leaf.untyped_storage().nbytes()
            found[storage_key(leaf)] = int(nbytes) if isinstance(nbytes, int) else _hint(nbytes)
    return found


def _hint(size: torch.SymInt) -> int:
    return int(size.node.hint or 0)
