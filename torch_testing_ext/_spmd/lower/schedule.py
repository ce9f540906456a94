"""Lowering of gradient markers to buckets, in the order in which gradients become ready.

A collective starts as soon as its gradients are ready; the wait for it comes where its result is first used. All that
follows the last gradient is sorted by the buckets that it needs: the parameters of the first bucket are updated while
the other buckets are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from ..param_layout import Layout
from .buckets import (
    Bucket,
    CollectiveOptions,
    finish_all_reduce,
    finish_reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from .direct import is_large
from .graphs import nbytes, operand, param_of, placeholders, reads, storages, writes
from .markers import AVERAGE, SCATTER

_MARKERS = (AVERAGE, SCATTER)


@dataclass
class _Reduction:
    bucket: Bucket
    markers: list[fx.Node] = field(default_factory=list)
    started: fx.Node | None = None

    def put_large_first(self) -> None:
        """Sort the gradients: those that the program can write directly to the bucket come first."""
        bucket = self.bucket
        order = sorted(range(len(self.markers)), key=lambda i: not is_large(operand(self.markers[i]).meta["val"]))
        self.markers = [self.markers[i] for i in order]
        bucket.params, bucket.names = [bucket.params[i] for i in order], [bucket.names[i] for i in order]


def schedule_gradients(
    old: fx.Graph, layouts: list[Layout], names: list[str], options: CollectiveOptions
) -> tuple[fx.Graph, list[Bucket]]:
    """Return a new graph with the markers lowered, and the buckets."""
    scheduler = _Scheduler(old, layouts, names, options)
    return scheduler.run(), [reduction.bucket for reduction in scheduler.reductions]


class _Scheduler:
    def __init__(self, old: fx.Graph, layouts: list[Layout], names: list[str], options: CollectiveOptions) -> None:
        self.old, self.layouts, self.names, self.options = old, layouts, names, options
        self.new = fx.Graph()
        self.new_of: dict[fx.Node, fx.Node] = {}
        self.reductions: list[_Reduction] = []
        self.reduction_of: dict[fx.Node, _Reduction] = {}
        self.params = placeholders(old)  # parameters are the first inputs

    def run(self) -> fx.Graph:
        nodes = list(self.old.nodes)
        markers = [node for node in nodes if node.target in _MARKERS]
        following = _following_bytes(markers)
        limit = self.options.limit([operand(marker).meta["val"] for marker in markers])
        end = nodes.index(markers[-1]) + 1 if markers else len(nodes) - 1
        for node in nodes[:end]:
            if node.target in _MARKERS:
                self._add(node, following.get(node), limit)
            else:
                self._emit(node)
        for reduction in self.reductions:
            self._start(reduction)
        for node in self._by_bucket(nodes[end:-1]):
            self._emit(node)
        for reduction in self.reductions:  # one that this rank does not read is needed by others
            self._finish(reduction)
        self._emit(nodes[-1])
        return self.new

    def _emit(self, node: fx.Node) -> None:
        written = writes(node)
        for reduction in self.reductions:  # a bucket is packed when it starts
            if written and reduction.started is None and any(written & storages(operand(m)) for m in reduction.markers):
                self._start(reduction)
        self.new_of[node] = self.new.node_copy(node, self._result)

    def _result(self, node: fx.Node) -> fx.Node:
        """The new node for an old one; for a marker, wait for its bucket first."""
        if node not in self.new_of:
            self._finish(self.reduction_of[node])
        return self.new_of[node]

    def _add(self, marker: fx.Node, following: int | None, limit: int) -> None:
        key = _bucket_key(marker)
        open_ = (r for r in self.reductions if r.started is None and _bucket_key(r.markers[0]) == key)
        reduction = next(open_, None)
        if reduction is None:
            kind = "all_reduce" if marker.target is AVERAGE else "reduce_scatter"
            reduction = _Reduction(Bucket(kind, operand(marker).meta["val"].dtype))
            self.reductions.append(reduction)
        param = param_of(marker)
        reduction.bucket.add(param, self.names[param], nbytes(operand(marker).meta["val"]))
        reduction.markers.append(marker)
        self.reduction_of[marker] = reduction
        if following is None or reduction.bucket.nbytes + following > limit:
            self._start(reduction)

    def _start(self, reduction: _Reduction) -> None:
        if reduction.started is not None:
            return
        averages = reduction.bucket.collective == "all_reduce"
        if averages:
            reduction.put_large_first()
        grads = [self._result(operand(marker)) for marker in reduction.markers]
        start = start_all_reduce if averages else start_reduce_scatter
        reduction.started = start(self.new, grads, self.options)

    def _finish(self, reduction: _Reduction) -> None:
        if reduction.markers[0] in self.new_of:
            return
        self._start(reduction)
        assert reduction.started is not None
        templates = [self.new_of[self.params[param]] for param in reduction.bucket.params]
        if reduction.bucket.collective == "all_reduce":
            results = finish_all_reduce(self.new, reduction.started, templates)
        else:
            layouts = [self.layouts[param] for param in reduction.bucket.params]
            results = finish_reduce_scatter(self.new, reduction.started, layouts, templates)
        self.new_of.update(zip(reduction.markers, results, strict=True))

    def _by_bucket(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Sort nodes by the last bucket that they need, directly or through values and memory.

        Nodes that need none come right before the first one that needs them, while their values are in the cache.
        """
        number = {marker: i for i, reduction in enumerate(self.reductions) for marker in reduction.markers}
        memory = {node: (reads(node) | storages(node), writes(node)) for node in nodes}
        write: dict[int, int] = {}  # storage -> the last bucket that a node which writes to it needs
        access: dict[int, int] = {}
        for node in nodes:
            read, written = memory[node]
            needed = [number[arg] for arg in node.all_input_nodes if arg in number]
            needed += [write[storage] for storage in read if storage in write]
            needed += [access[storage] for storage in written if storage in access]
            number[node] = max(needed, default=-1)
            _widen(access, read | written, number[node], max)
            _widen(write, written, number[node], max)
        write.clear()
        access.clear()
        for node in reversed(nodes):
            read, written = memory[node]
            if number[node] < 0:
                following = [number[user] for user in node.users if user in number]
                following += [write[storage] for storage in read if storage in write]
                following += [access[storage] for storage in written if storage in access]
                number[node] = min(following, default=-1)
            _widen(access, read | written, number[node], min)
            _widen(write, written, number[node], min)
        return sorted(nodes, key=number.__getitem__)


def _following_bytes(markers: list[fx.Node]) -> dict[fx.Node, int]:
    """For each marker, the size of the next gradient that its bucket could take. The last ones have none."""
    found: dict[fx.Node, int] = {}
    last: dict[object, fx.Node] = {}
    for node in markers:
        key = _bucket_key(node)
        if key in last:
            found[last[key]] = nbytes(operand(node).meta["val"])
        last[key] = node
    return found


def _widen(bounds: dict[int, int], keys: set[int], value: int, extreme: Callable[[int, int], int]) -> None:
    for key in keys:
        bounds[key] = extreme(bounds.get(key, value), value)


def _bucket_key(marker: fx.Node) -> tuple[object, ...]:
    return marker.target, operand(marker).meta["val"].dtype
