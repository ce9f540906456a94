"""The parameters that a backward reaches, read from the autograd graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from .managed_params import managed_by


def unmanaged_parameters(roots: Iterable[Any], known: Collection[int]) -> list[nn.Parameter]:
    """Parameters among the leaves of a graph that the engine does not manage. Other leaves are the rank's own.

    `known` are the identities of parameters that it does manage.
    """
    found = []
    seen = set()
    waiting = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ != "AccumulateGrad":
            waiting += [following for following, _ in node.next_functions]
            continue
        leaf = node.variable
        if id(leaf) not in known and isinstance(leaf, nn.Parameter) and managed_by(leaf) is None:
            found.append(leaf)
    return found
