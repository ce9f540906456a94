"""Lowering the reads of sharded parameters: bucketed all_gathers, started early, waited for late.

A bucket is started where the one before it is first used, so that it travels while that one is worked with. With
`reshard`, what backward needs is gathered again instead of being kept since forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from ..layout import Layout
from ..trace.markers import GATHER
from .buckets import Bucket, Wire, finish_all_gather, start_all_gather
from .graphs import is_view, nbytes, operand, param_of, storages, writes


@dataclass
class _Gathering:
    bucket: Bucket
    markers: list[fx.Node] = field(default_factory=list)
    backward: bool = False
    not_before: int = -1  # position of the last write to any of its shards
    first_use: int = 0


def lower_gathers(graph: fx.Graph, layouts: list[Layout], names: list[str], wire: Wire, reshard: bool) -> list[Bucket]:
    if wire.world == 1:
        for marker in _markers(graph):
            marker.replace_all_uses_with(operand(marker))
            graph.erase_node(marker)
        return []
    if reshard:
        _gather_again_in_backward(graph)
    position = {node: i for i, node in enumerate(graph.nodes)}
    nodes = list(position)
    gatherings = _grouped(graph, position, names, wire)
    for number, gathering in enumerate(gatherings):
        start = gathering.not_before + 1
        if number > 0:
            before = gatherings[number - 1]
            start = max(start, before.first_use)
            if gathering.backward and not before.backward:
                start = gathering.first_use
        start = min(max(start, _first_operation(nodes)), gathering.first_use)
        at = [layouts[param_of(marker)] for marker in gathering.markers]
        shards = [operand(marker) for marker in gathering.markers]
        with graph.inserting_before(nodes[start]):
            started = start_all_gather(graph, shards, at, wire)
        with graph.inserting_before(nodes[gathering.first_use]):
            wholes = finish_all_gather(graph, started, at, wire)
        for marker, whole in zip(gathering.markers, wholes, strict=True):
            marker.replace_all_uses_with(whole)
    for marker in _markers(graph):
        graph.erase_node(marker)
    return [gathering.bucket for gathering in gatherings]


def _markers(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is GATHER]


def _first_operation(nodes: list[fx.Node]) -> int:
    return next(i for i, node in enumerate(nodes) if node.op != "placeholder")


def _grouped(graph: fx.Graph, position: dict[fx.Node, int], names: list[str], wire: Wire) -> list[_Gathering]:
    last_write: dict[int, int] = {}
    open_ones: dict[object, _Gathering] = {}
    closed: list[_Gathering] = []
    writes_before: dict[fx.Node, int] = {}
    for node, i in position.items():
        if node.target is GATHER:
            writes_before[node] = max((last_write.get(s, -1) for s in storages(operand(node))), default=-1)
        for storage in writes(node):
            last_write[storage] = i
    first_use = {marker: min(position[user] for user in marker.users) for marker in writes_before if marker.users}
    for marker in sorted(first_use, key=first_use.__getitem__):
        param = param_of(marker)
        value = operand(marker).meta["val"]
        backward = bool(marker.meta.get("backward"))
        key = (value.dtype, backward)
        gathering = open_ones.get(key)
        whole_bytes = nbytes(marker.meta["val"])
        full = gathering is not None and gathering.bucket.nbytes + whole_bytes > wire.bucket_bytes
        if gathering is None or full or writes_before[marker] >= gathering.first_use:
            gathering = _Gathering(Bucket("all_gather", value.dtype), backward=backward, first_use=first_use[marker])
            open_ones[key] = gathering
            closed.append(gathering)
        gathering.bucket.add(param, names[param], whole_bytes)
        gathering.markers.append(marker)
        gathering.not_before = max(gathering.not_before, writes_before[marker])
    return closed


def _gather_again_in_backward(graph: fx.Graph) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    for marker in _markers(graph):
        if marker.meta.get("backward"):
            continue
        family = _with_views(marker)
        late = [(member, user) for member in family for user in member.users if user.meta.get("backward")]
        if late:
            copies: dict[fx.Node, fx.Node] = {}
            with graph.inserting_before(min((user for _, user in late), key=order.__getitem__)):
                for member, user in late:
                    user.replace_input_with(member, _copied(graph, member, marker, copies))


def _with_views(marker: fx.Node) -> list[fx.Node]:
    """The marker and what forward made of it that is still the same memory."""
    family = [marker]
    for member in family:
        family += [user for user in member.users if is_view(user) and not user.meta.get("backward")]
    return family


def _copied(graph: fx.Graph, member: fx.Node, marker: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    if member not in copies:
        inner = {} if member is marker else {operand(member): _copied(graph, operand(member), marker, copies)}
        copy = graph.node_copy(member, lambda arg: inner.get(arg, arg))
        copy.meta = {**member.meta, "backward": True}
        copies[member] = copy
    return copies[member]
