"""Lowering of reads of sharded parameters to bucketed all_gathers that overlap with computation.

The all_gather of a bucket starts at the first use of the previous bucket, and runs while that bucket is in use. With
`reshard`, backward gathers parameters again instead of using those that forward gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from ..param_layout import Layout
from ..trace.markers import GATHER
from .buckets import Bucket, CollectiveOptions, finish_all_gather, start_all_gather
from .graphs import is_view, nbytes, operand, param_of, refresh, storages, writes


@dataclass
class _Gathering:
    bucket: Bucket
    markers: list[fx.Node] = field(default_factory=list)
    backward: bool = False
    last_write: int = -1  # the position of the last write to any of its shards
    first_use: int = 0


def lower_gathers(graph: fx.Graph, layouts: list[Layout], names: list[str], options: CollectiveOptions) -> list[Bucket]:
    """Replace the gather markers of `graph` in place, and return the buckets."""
    if options.world == 1:
        for marker in _markers(graph):
            marker.replace_all_uses_with(operand(marker))
            graph.erase_node(marker)
        return []
    limit = options.limit([marker.meta["val"] for marker in _markers(graph)])
    if options.reshard:
        _duplicate_gathers_for_backward(graph)
    position = {node: i for i, node in enumerate(graph.nodes)}
    nodes = list(position)
    gatherings = _grouped(graph, position, names, limit)
    for number, gathering in enumerate(gatherings):
        start = gathering.last_write + 1
        if number > 0:
            before = gatherings[number - 1]
            start = max(start, before.first_use)
            if gathering.backward and not before.backward:
                start = gathering.first_use
        start = min(max(start, _first_operation(nodes)), gathering.first_use)
        gathered_layouts = [layouts[param_of(marker)] for marker in gathering.markers]
        shards = [operand(marker) for marker in gathering.markers]
        with graph.inserting_before(nodes[start]):
            started = start_all_gather(graph, shards, gathered_layouts, options)
        with graph.inserting_before(nodes[gathering.first_use]):
            wholes = finish_all_gather(graph, started, gathered_layouts, options)
        for marker, whole in zip(gathering.markers, wholes, strict=True):
            marker.replace_all_uses_with(whole)
    markers = _markers(graph)
    replaced = set().union(*map(storages, markers))
    for marker in markers:
        graph.erase_node(marker)
    for node in graph.nodes:
        if storages(node) & replaced:  # a view of a marker, now of the gathered parameter
            refresh(node)
    return [gathering.bucket for gathering in gatherings]


def _markers(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is GATHER]


def _first_operation(nodes: list[fx.Node]) -> int:
    return next(i for i, node in enumerate(nodes) if node.op != "placeholder")


def _grouped(graph: fx.Graph, position: dict[fx.Node, int], names: list[str], limit: int) -> list[_Gathering]:
    last_write: dict[int, int] = {}
    latest: dict[object, _Gathering] = {}  # by dtype and phase: may still grow
    gatherings: list[_Gathering] = []
    writes_before: dict[fx.Node, int] = {}
    for node, i in position.items():
        if node.target is GATHER:
            shard = operand(node)
            created = -1 if shard.op == "placeholder" else position[shard]
            writes_before[node] = max((last_write.get(s, -1) for s in storages(shard)), default=-1)
            writes_before[node] = max(writes_before[node], created)
        for storage in writes(node):
            last_write[storage] = i
    first_use = {marker: min(position[user] for user in marker.users) for marker in writes_before if marker.users}
    for marker in sorted(first_use, key=first_use.__getitem__):
        param = param_of(marker)
        value = operand(marker).meta["val"]
        backward = bool(marker.meta.get("backward"))
        key = (value.dtype, backward)
        gathering = latest.get(key)
        whole_bytes = nbytes(marker.meta["val"])
        full = gathering is not None and gathering.bucket.nbytes + whole_bytes > limit
        if gathering is None or full or writes_before[marker] >= gathering.first_use:
            gathering = _Gathering(Bucket("all_gather", value.dtype), backward=backward, first_use=first_use[marker])
            latest[key] = gathering
            gatherings.append(gathering)
        gathering.bucket.add(param, names[param], whole_bytes)
        gathering.markers.append(marker)
        gathering.last_write = max(gathering.last_write, writes_before[marker])
    return gatherings


def _duplicate_gathers_for_backward(graph: fx.Graph) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    for marker in _markers(graph):
        if marker.meta.get("backward") or marker.meta.get("written"):
            continue
        uses = [(view, user) for view in _with_views(marker) for user in view.users if user.meta.get("backward")]
        if uses:
            copies: dict[fx.Node, fx.Node] = {}
            with graph.inserting_before(min((user for _, user in uses), key=order.__getitem__)):
                for view, user in uses:
                    user.replace_input_with(view, _copied(graph, view, marker, copies))


def _with_views(marker: fx.Node) -> list[fx.Node]:
    """The marker and its direct and indirect views in forward."""
    views = [marker]
    for view in views:
        views += [user for user in view.users if is_view(user) and not user.meta.get("backward")]
    return views


def _copied(graph: fx.Graph, view: fx.Node, marker: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    if view not in copies:
        inner = {} if view is marker else {operand(view): _copied(graph, operand(view), marker, copies)}
        copy = graph.node_copy(view, lambda arg: inner.get(arg, arg))
        copy.meta = {**view.meta, "backward": True}
        copies[view] = copy
    return copies[view]
