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
    """A bucket of shards that are gathered together."""

    # The position of the last write to any of its shards.
    last_write: int = -1
    first_use: int = 0


def lower_gathers(graph: fx.Graph, layouts: list[Layout], names: list[str], options: CollectiveOptions) -> list[Bucket]:
    """Replace the markers GATHER and ROWS of `graph` in place, and return the buckets."""
    _lower_rows(graph, layouts)
    nodes = list(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    markers = [node for node in nodes if node.target is GATHER]
    limit = options.limit([marker.meta["val"] for marker in markers])
    gatherings = _grouped(position, names, limit)
    # The first one starts with the first computation, each other one at the first use of the one before.
    earliest = next(number for number, node in enumerate(nodes) if node.op not in ("placeholder", "get_attr"))
    for gathering in gatherings:
        is_written = gathering.last_write >= 0
        start = gathering.first_use if is_written else min(earliest, gathering.first_use)
        earliest = gathering.first_use
        parts = [layouts[param_of(marker)] for marker in gathering.markers]
        shards = [operand(marker) for marker in gathering.markers]
        with graph.inserting_before(nodes[start]):
            started = start_all_gather(graph, shards, parts, options)
        with graph.inserting_before(nodes[gathering.first_use]):
            wholes = finish_all_gather(graph, started, parts, options.world)
        for marker, whole in zip(gathering.markers, wholes, strict=True):
            marker.replace_all_uses_with(whole)
    _erase(graph, markers)
    return [*gatherings]


def _erase(graph: fx.Graph, markers: list[fx.Node]) -> None:
    """Erase markers that nothing uses any more, and compute the fake values of what were views of them."""
    replaced = set().union(*map(storages, markers))
    for marker in markers:
        graph.erase_node(marker)
    for node in graph.nodes:
        if storages(node) & replaced:
            refresh(node)


def _lower_rows(graph: fx.Graph, layouts: list[Layout]) -> None:
    for node in list(graph.nodes):
        if node.target is not ROWS:
            continue
        start, end = layouts[param_of(node)].rows
        with graph.inserting_before(node):
            rows = call(graph, aten.slice.Tensor, operand(node), 0, start, end)
            copy = call(graph, aten.clone.default, rows)
        # Later nodes have this storage.
        copy.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(copy)
        graph.erase_node(node)


def _grouped(position: dict[fx.Node, int], names: list[str], limit: int) -> list[_Gathering]:
    """The markers in buckets of at most this size, by type, in the order of their first use.

    A bucket is used for the first time after the last write to any of its shards.
    """
    writes_before = _writes_before(position)
    first_use = {marker: min(position[user] for user in marker.users) for marker in writes_before}
    # By type: the gathering that may still grow.
    latest: dict[object, _Gathering] = {}
    gatherings: list[_Gathering] = []
    for marker in sorted(first_use, key=first_use.__getitem__):
        whole = marker.meta["val"]
        gathering = latest.get(whole.dtype)
        is_full = gathering is not None and gathering.nbytes + whole.nbytes > limit
        if gathering is None or is_full or writes_before[marker] >= gathering.first_use:
            gathering = latest[whole.dtype] = _Gathering("all_gather", whole.dtype, first_use=first_use[marker])
            gatherings.append(gathering)
        gathering.add(marker, names, whole.nbytes)
        gathering.last_write = max(gathering.last_write, writes_before[marker])
    return gatherings


def _writes_before(position: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """For each marker, the position at which its shard was made or written last; -1 for an input that was not."""
    last_write: dict[int, int] = {}
    before: dict[fx.Node, int] = {}
    for node, number in position.items():
        if node.target is GATHER:
            shard = operand(node)
            created = -1 if shard.op == "placeholder" else position[shard]
            written = [last_write.get(storage, -1) for storage in storages(shard)]
            before[node] = max(created, *written)
        for storage in writes(node):
            last_write[storage] = number
    return before
