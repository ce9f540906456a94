"""Lowering of gradient markers to buckets, in the order in which gradients become ready.

The graph is copied in its old order, with one change: nodes that need a reduced gradient are postponed until no other
node is left, or until a bucket needs them. Collectives thus start as soon as their gradients are ready, and the waits
for them come as late as possible. Since the graph writes in place, nodes that touch the same memory are postponed too.

The postponed nodes follow in the order of the buckets that they need: the parameters of the first bucket are updated
while the other buckets are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from ..param_layout import Layout
from ..trace.markers import GRAD_SYNC, SCATTER_GRAD
from .buckets import (
    Bucket,
    CollectiveOptions,
    finish_reduce_scatter,
    mean_scaled,
    pack_gradients,
    start_all_reduce,
    start_reduce_scatter,
    unpack,
    wait_for,
)
from .direct import is_large
from .graphs import nbytes, operand, param_of, reads, storages, writes

_MARKERS = (GRAD_SYNC, SCATTER_GRAD)


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
        self.open: dict[object, _Reduction] = {}
        self.postponed: list[fx.Node] = []
        self.late: set[fx.Node] = set()  # postponed nodes, and markers without a result yet
        self.late_reads: set[int] = set()
        self.late_writes: set[int] = set()
        self.params: dict[int, fx.Node] = {}
        self.following = self._following_bytes()
        self.limit = options.limit([operand(node).meta["val"] for node in old.nodes if node.target in _MARKERS])

    def run(self) -> fx.Graph:
        placeholders = [node for node in self.old.nodes if node.op == "placeholder"]
        for i in range(len(self.layouts)):
            self.params[i] = placeholders[i]  # parameters are the first inputs
        remaining = sum(node.target in _MARKERS for node in self.old.nodes) if self.options.world > 1 else -1
        for node in self.old.nodes:
            if node.op == "output":
                self._flush()
                self._emit(node)
            elif node.target in _MARKERS:
                remaining -= 1
                self._lower_marker(node)
            elif remaining == 0 or self._is_late(node):
                self._postpone(node)
            else:
                self._emit(node)
        return self.new

    def _following_bytes(self) -> dict[fx.Node, int]:
        """For each marker, the size of the next gradient that its bucket could take. The last ones have none."""
        found: dict[fx.Node, int] = {}
        last: dict[object, fx.Node] = {}
        for node in self.old.nodes:
            if node.target in _MARKERS:
                key = _bucket_key(node)
                if key in last:
                    found[last[key]] = nbytes(operand(node).meta["val"])
                last[key] = node
        return found

    def _emit(self, node: fx.Node) -> None:
        self.new_of[node] = self.new.node_copy(node, self._result)

    def _result(self, node: fx.Node) -> fx.Node:
        """The new node for an old one; for a marker, wait for its bucket first."""
        if node not in self.new_of:
            self._finish(self.reduction_of[node])
        return self.new_of[node]

    def _is_late(self, node: fx.Node) -> bool:
        if any(arg in self.late for arg in node.all_input_nodes):
            return True
        if not self.late_reads and not self.late_writes:
            return False
        return bool(reads(node) & self.late_writes or writes(node) & (self.late_reads | self.late_writes))

    def _postpone(self, node: fx.Node) -> None:
        self.postponed.append(node)
        self.late.add(node)
        self.late_reads |= reads(node)
        self.late_writes |= writes(node)

    def _lower_marker(self, marker: fx.Node) -> None:
        grad = operand(marker)
        if self.options.world == 1:
            if self._is_late(marker):
                self._flush()
            self.new_of[marker] = self.new_of[grad]
            return
        if self._is_late(marker):
            self._flush()
        value = grad.meta["val"]
        key = _bucket_key(marker)
        reduction = self.open.get(key)
        if reduction is None:
            kind = "all_reduce" if marker.target is GRAD_SYNC else "reduce_scatter"
            reduction = self.open[key] = _Reduction(Bucket(kind, value.dtype))
            self.reductions.append(reduction)
        param = param_of(marker)
        reduction.bucket.add(param, self.names[param], nbytes(value))
        reduction.markers.append(marker)
        self.reduction_of[marker] = reduction
        self.late.add(marker)
        self.late_reads |= storages(grad)
        following = self.following.get(marker)
        if following is None or reduction.bucket.nbytes + following > self.limit:
            self._start(reduction)

    def _start(self, reduction: _Reduction) -> None:
        self.open = {key: other for key, other in self.open.items() if other is not reduction}
        if reduction.bucket.collective == "all_reduce":
            reduction.put_large_first()
        grads = [self.new_of[operand(marker)] for marker in reduction.markers]
        if reduction.bucket.collective == "all_reduce":
            flat = mean_scaled(self.new, pack_gradients(self.new, grads, self.options), self.options, owned=True)
            reduction.started = start_all_reduce(self.new, flat, self.options)
        else:
            layouts = [self.layouts[param] for param in reduction.bucket.params]
            reduction.started = start_reduce_scatter(self.new, grads, layouts, self.options)

    def _finish(self, reduction: _Reduction) -> None:
        assert reduction.started is not None
        layouts = [self.layouts[param] for param in reduction.bucket.params]
        templates = [self.new_of[self.params[param]] for param in reduction.bucket.params]
        if reduction.bucket.collective == "all_reduce":
            flat = wait_for(self.new, reduction.started)
            results = unpack(self.new, flat, [layout.shape for layout in layouts], templates, self.options)
        else:
            results = finish_reduce_scatter(self.new, reduction.started, layouts, templates, self.options)
        for marker, result in zip(reduction.markers, results, strict=True):
            self.new_of[marker] = result

    def _flush(self) -> None:
        for reduction in list(self.open.values()):
            self._start(reduction)
        for node in self._by_bucket(self.postponed):
            self._emit(node)
        for reduction in self.reductions:
            # A gradient that this rank does not read is reduced nevertheless, because another rank may read its own.
            if reduction.markers[0] not in self.new_of:
                self._finish(reduction)
        self.postponed, self.late, self.late_reads, self.late_writes = [], set(), set(), set()

    def _by_bucket(self, postponed: list[fx.Node]) -> list[fx.Node]:
        """Sort nodes by the last bucket that they need, directly or through values and memory.

        Nodes that need none come right before the first one that needs them, while their values are in the cache.
        """
        number = {marker: i for i, reduction in enumerate(self.reductions) for marker in reduction.markers}
        memory = {node: (reads(node) | storages(node), writes(node)) for node in postponed}
        write: dict[int, int] = {}  # storage -> the last bucket that a node which writes to it needs
        access: dict[int, int] = {}
        for node in postponed:
            read, written = memory[node]
            needed = [number[arg] for arg in node.all_input_nodes if arg in number]
            needed += [write[storage] for storage in read if storage in write]
            needed += [access[storage] for storage in written if storage in access]
            number[node] = max(needed, default=-1)
            _widen(access, read | written, number[node], max)
            _widen(write, written, number[node], max)
        write.clear()
        access.clear()
        for node in reversed(postponed):
            read, written = memory[node]
            if number[node] < 0:
                following = [number[user] for user in node.users if user in number]
                following += [write[storage] for storage in read if storage in write]
                following += [access[storage] for storage in written if storage in access]
                number[node] = min(following, default=-1)
            _widen(access, read | written, number[node], min)
            _widen(write, written, number[node], min)
        return sorted(postponed, key=number.__getitem__)


def _widen(bounds: dict[int, int], keys: set[int], value: int, extreme: Callable[[int, int], int]) -> None:
    for key in keys:
        bounds[key] = extreme(bounds.get(key, value), value)


def _bucket_key(marker: fx.Node) -> tuple[object, ...]:
    return marker.target, operand(marker).meta["val"].dtype
