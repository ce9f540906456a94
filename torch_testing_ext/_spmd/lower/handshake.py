"""The flag in a program's first collective, by which a rank tells the others that it does not run this program.

Ranks that run different programs would wait for each other forever, or mix up their collectives. To compare programs
before each call would cost a collective. Instead the first collective of a program carries one more element per rank,
0 as long as the rank runs the program that all ranks expect. A rank that cannot, or runs another program, takes part
in the collectives up to the point where the others look at the flags, with a flag of 1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_testing_ext._torch.spmd import storage_key

from .buckets import Bucket, aten, c10d, is_packed
from .graphs import refresh, storages
from .updates import SharedUpdates

_FLAG = "_program_flag"


class ProgramChanged(Exception):
    """Another rank does not run this program."""


def look_at_sum(flat: torch.Tensor) -> None:
    """Raise an exception if the last element, the sum of all ranks' flags, is not 0."""
    if flat[-1].item():
        raise ProgramChanged


def look_at_all(flags: torch.Tensor) -> None:
    """Raise an exception if any of the flags is not 0."""
    if flags.any().item():
        raise ProgramChanged


@dataclass
class Handshake:
    """The identity of a program for other ranks, and the collectives that precede its look at the flags.

    signature: its collectives; updates: what it changes of the things that all ranks share.

    collectives: the operation, the shape, dtype and device of its first argument, and its other arguments. Empty if
    the flag has a collective of its own.
    """

    signature: tuple[str, ...]
    updates: tuple[str, ...] = ()
    collectives: list[tuple[Callable[..., Any], Any, torch.dtype, torch.device, tuple[Any, ...]]] = field(
        default_factory=list
    )

    @property
    def facts(self) -> dict[str, list[str]]:
        """The facts that must be the same on all ranks, by title."""
        return {"collectives": list(self.signature), "updates": list(self.updates)}

    def decline(self) -> None:
        """Take part in the collectives with a flag of 1."""
        started = []
        for i, (target, shape, dtype, device, args) in enumerate(self.collectives):
            value = torch.zeros(shape, dtype=dtype, device=device)
            if i == 0:
                value[-1] = 1
            started.append(target(value, *args))
        for each in started:
            c10d.wait_tensor.default(each)


def make_handshake(
    module: fx.GraphModule, buckets: list[Bucket], updates: SharedUpdates, compiled: bool
) -> Handshake | None:
    """Add the flag to the first collective of `module`, in place, if it has room for it.

    A program that neither communicates nor changes what the ranks share needs no handshake: None.
    """
    graph = module.graph
    nodes = list(graph.nodes)
    collectives = [node for node in nodes if _is_collective(node)]
    shared = tuple(updates.lines)
    if not collectives:
        return Handshake(("no collective",), shared) if updates.writes else None
    signature = (*(f"{b.collective} of {b.dtype}, {b.names}" for b in buckets), *map(_describe, collectives))
    wait = next((user for user in collectives[0].users if user.target is c10d.wait_tensor.default), None)
    own = Handshake((*signature, "with a flag of its own"), shared)
    if compiled or wait is None or collectives[0].meta["val"].device.type != "cpu":
        return own
    first_wait = next(node for node in nodes if node.target is c10d.wait_tensor.default)
    early = [node for node in collectives if nodes.index(node) < nodes.index(first_wait)]
    if first_wait is not wait:
        first_wait.prepend(wait)  # before anything uses a result, and changes the model
    if not all(_is_static(node) for node in early) or not _embed(module, collectives[0], wait):
        return own
    module.recompile()
    found = []
    for node in early:
        value = node.args[0].meta["val"]
        found.append((node.target, tuple(value.shape), value.dtype, value.device, node.args[1:]))
    return Handshake(signature, shared, found)


def _is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional" and node.target is not c10d.wait_tensor.default


def _describe(node: fx.Node) -> str:
    value = node.meta.get("val")
    shape = [size if isinstance(size, int) else "?" for size in getattr(value, "shape", ())]
    others = [arg for arg in node.args[1:] if isinstance(arg, (str, int))]
    return f"{str(node.target).split('.')[1].rstrip('_')} of {getattr(value, 'dtype', '')}{shape} {others}"


def _is_static(node: fx.Node) -> bool:
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _embed(module: fx.GraphModule, first: fx.Node, wait: fx.Node) -> bool:
    graph: fx.Graph = module.graph
    scaled: Any = first.args[0]
    packed: Any = scaled
    look: Callable[[torch.Tensor], None]
    if first.target is c10d.all_reduce_.default and first.args[1] == "sum":
        if isinstance(scaled, fx.Node) and scaled.target is aten.mul_.Tensor:
            packed = scaled.args[0]
        if not is_packed(packed):
            return False
        chain, looked_at, look = [packed, scaled, first, wait], wait, look_at_sum
    elif first.target is c10d.all_gather_into_tensor.default and is_packed(packed):
        rows = next(iter(wait.users))
        parts = next(iter(rows.users))
        if len(wait.users) != 1 or rows.target is not aten.view.default or len(rows.users) != 1:
            return False
        if parts.target is not aten.split_with_sizes_copy.default:
            return False
        shape: Any = rows.args[1]
        sizes: Any = parts.args[1]
        rows.args = (wait, [shape[0], shape[1] + 1])
        parts.args = (rows, [*sizes, 1], 1)
        wait.append(rows)
        rows.append(parts)
        chain, looked_at, look = [packed, first, wait, rows, parts], parts, look_at_all
    else:
        return False
    value = packed.meta["val"]
    module.register_buffer(_FLAG, torch.zeros(1, dtype=value.dtype, device=value.device), persistent=False)
    with graph.inserting_before(packed):
        flag = graph.get_attr(_FLAG)
    with value.fake_mode:
        flag.meta["val"] = torch.empty(1, dtype=value.dtype, device=value.device)
    packed.args = ([*packed.args[0], flag],)
    _refresh(graph, chain)
    with graph.inserting_after(looked_at):
        operand = looked_at
        if look is look_at_all:
            operand = graph.call_function(operator.getitem, (looked_at, len(sizes)))
            refresh(operand)
    with graph.inserting_after(operand):
        graph.call_function(look, (operand,))
    return True


def _refresh(graph: fx.Graph, chain: list[fx.Node]) -> None:
    """Compute the fake values of `chain` again, and of the views of its memory."""
    before = set().union(*map(storages, chain))
    for node in chain:
        refresh(node)
    for node in graph.nodes:
        value = node.meta.get("val")
        leaves = value if isinstance(value, (list, tuple)) else [value]
        if node not in chain and any(isinstance(v, torch.Tensor) and storage_key(v) in before for v in leaves):
            refresh(node)
