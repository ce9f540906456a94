"""Lowering of gathers to bucketed all_gathers that overlap with computation.

The all_gather of parameters starts at the first use of the previous bucket, and runs while that bucket is in use.
"""

from dataclasses import dataclass

from torch import fx

from ..param_layout import Layout
from .buckets import Bucket, CollectiveOptions, aten, finish_all_gather, start_all_gather
from .graphs import GATHER, ROWS, call, operand, param_of, refresh, storages, writes


@dataclass
class _Gathering(Bucket):
    last_write: int = -1  # the position of the last write to any of its shards
    first_use: int = 0


def lower_gathers(graph: fx.Graph, layouts: list[Layout], names: list[str], options: CollectiveOptions) -> list[Bucket]:
    """Replace the markers GATHER and ROWS of `graph` in place, and return the buckets."""
    _lower_rows(graph, layouts)
    markers = [node for node in graph.nodes if node.target is GATHER]
    position = {node: i for i, node in enumerate(graph.nodes)}
    nodes = list(position)
    first = next(i for i, node in enumerate(nodes) if node.op not in ("placeholder", "get_attr"))
    gatherings = _grouped(position, names, options.limit([marker.meta["val"] for marker in markers]))
    for number, gathering in enumerate(gatherings):
        start = gatherings[number - 1].first_use if number else first
        start = gathering.first_use if gathering.last_write >= 0 else min(start, gathering.first_use)
        parts = [layouts[param_of(marker)] for marker in gathering.markers]
        with graph.inserting_before(nodes[start]):
            started = start_all_gather(graph, [operand(marker) for marker in gathering.markers], parts, options)
        with graph.inserting_before(nodes[gathering.first_use]):
            wholes = finish_all_gather(graph, started, parts, options.world)
        for marker, whole in zip(gathering.markers, wholes, strict=True):
            marker.replace_all_uses_with(whole)
    replaced = set().union(*map(storages, markers))
    for marker in markers:
        graph.erase_node(marker)
    for node in graph.nodes:
        if storages(node) & replaced:  # a view of a marker, now of the gathered tensor
            refresh(node)
    return [*gatherings]


def _lower_rows(graph: fx.Graph, layouts: list[Layout]) -> None:
    for node in [node for node in graph.nodes if node.target is ROWS]:
        with graph.inserting_before(node):
            rows = call(graph, aten.slice.Tensor, operand(node), 0, *layouts[param_of(node)].rows)
            copy = call(graph, aten.clone.default, rows)
        copy.meta["val"] = node.meta["val"]  # later nodes have this storage
        node.replace_all_uses_with(copy)
        graph.erase_node(node)


def _grouped(position: dict[fx.Node, int], names: list[str], limit: int) -> list[_Gathering]:
    last_write: dict[int, int] = {}
    writes_before: dict[fx.Node, int] = {}
    for node, i in position.items():
        if node.target is GATHER:
            shard = operand(node)
            created = -1 if shard.op == "placeholder" else position[shard]
            writes_before[node] = max((last_write.get(s, -1) for s in storages(shard)), default=-1)
            writes_before[node] = max(writes_before[node], created)
        for storage in writes(node):
            last_write[storage] = i
    latest: dict[object, _Gathering] = {}  # by dtype: may still grow
    gatherings: list[_Gathering] = []
    first_use = {marker: min(position[user] for user in marker.users) for marker in writes_before}
    for marker in sorted(first_use, key=first_use.__getitem__):
        dtype, size = marker.meta["val"].dtype, marker.meta["val"].nbytes
        gathering = latest.get(dtype)
        full = gathering is not None and gathering.nbytes + size > limit
        if gathering is None or full or writes_before[marker] >= gathering.first_use:
            gathering = latest[dtype] = _Gathering("all_gather", dtype, first_use=first_use[marker])
            gatherings.append(gathering)
        gathering.add(marker, names, size)
        gathering.last_write = max(gathering.last_write, writes_before[marker])
    return gatherings
