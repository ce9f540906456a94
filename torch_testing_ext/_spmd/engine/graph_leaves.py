"""The parameters that a backward reaches, read from the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .managed_params import managed_by


def unmanaged_parameters(roots: Iterable[Any]) -> list[nn.Parameter]:
    """Parameters among the leaves of a graph that the engine does not manage. Other leaves are the rank's own."""
    found = []
    seen = set()
    waiting = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is None:
            waiting += [following for following, _ in node.next_functions]
        elif isinstance(leaf, nn.Parameter) and managed_by(leaf) is None:
            found.append(leaf)
    return found
