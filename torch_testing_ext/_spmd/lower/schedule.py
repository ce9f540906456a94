"""Lowering the gradient markers: buckets in the order gradients become ready, and a schedule around them.

The graph is written anew, in its old order, with one change: what needs a reduced gradient is put off until nothing
else is left to do, or until a bucket needs it. So collectives start as soon as their gradients are there and are
waited for as late as possible. What is put off includes whatever touches the same memory, as the graph writes in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from ..layout import Layout
from ..trace.markers import GRAD_SYNC, SCATTER_GRAD
from .buckets import (
    Bucket,
    Wire,
    all_reduce,
    finish_reduce_scatter,
    flatten,
    mean_scaled,
    start_reduce_scatter,
    unflatten,
    wait,
)
from .graphs import nbytes, operand, param_of, reads, storages, writes


@dataclass
class _Reduction:
    bucket: Bucket
    markers: list[fx.Node] = field(default_factory=list)
    started: fx.Node | None = None


def schedule_gradients(
    old: fx.Graph, layouts: list[Layout], names: list[str], wire: Wire
) -> tuple[fx.Graph, dict[fx.Node, fx.Node], list[Bucket]]:
    """A new graph with the markers lowered, what each old node became, and the buckets."""
    scheduler = _Scheduler(old, layouts, names, wire)
    return scheduler.run(), scheduler.new_of, [reduction.bucket for reduction in scheduler.reductions]


class _Scheduler:
    def __init__(self, old: fx.Graph, layouts: list[Layout], names: list[str], wire: Wire) -> None:
        self.old, self.layouts, self.names, self.wire = old, layouts, names, wire
        self.new = fx.Graph()
        self.new_of: dict[fx.Node, fx.Node] = {}
        self.reductions: list[_Reduction] = []
        self.reduction_of: dict[fx.Node, _Reduction] = {}
        self.open: dict[object, _Reduction] = {}
        self.put_off: list[fx.Node] = []
        self.late: set[fx.Node] = set()  # put off, or a marker whose result is not there yet
        self.late_reads: set[int] = set()
        self.late_writes: set[int] = set()
        self.params: dict[int, fx.Node] = {}

    def run(self) -> fx.Graph:
        placeholders = [node for node in self.old.nodes if node.op == "placeholder"]
        for i in range(len(self.layouts)):
            self.params[i] = placeholders[i]  # parameters are the first inputs
        for node in self.old.nodes:
            if node.op == "output":
                self._flush()
                self._emit(node)
            elif node.target in (GRAD_SYNC, SCATTER_GRAD):
                self._meet_marker(node)
            elif self._is_late(node):
                self._put_off(node)
            else:
                self._emit(node)
        return self.new

    def _emit(self, node: fx.Node) -> None:
        self.new_of[node] = self.new.node_copy(node, self._result)

    def _result(self, node: fx.Node) -> fx.Node:
        """What an old node became; for a marker, wait for its bucket first."""
        if node not in self.new_of:
            self._finish(self.reduction_of[node])
        return self.new_of[node]

    def _is_late(self, node: fx.Node) -> bool:
        if any(arg in self.late for arg in node.all_input_nodes):
            return True
        if not self.late_reads and not self.late_writes:
            return False
        return bool(reads(node) & self.late_writes or writes(node) & (self.late_reads | self.late_writes))

    def _put_off(self, node: fx.Node) -> None:
        self.put_off.append(node)
        self.late.add(node)
        self.late_reads |= reads(node)
        self.late_writes |= writes(node)

    def _meet_marker(self, marker: fx.Node) -> None:
        grad = operand(marker)
        if self.wire.world == 1:
            if self._is_late(marker):
                self._flush()
            self.new_of[marker] = self.new_of[grad]
            return
        if self._is_late(marker):
            self._flush()
        value = grad.meta["val"]
        key = (marker.target, value.dtype)
        reduction = self.open.get(key)
        if reduction is not None and reduction.bucket.nbytes + nbytes(value) > self.wire.bucket_bytes:
            self._start(reduction)
            reduction = None
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

    def _start(self, reduction: _Reduction) -> None:
        self.open = {key: other for key, other in self.open.items() if other is not reduction}
        grads = [self.new_of[operand(marker)] for marker in reduction.markers]
        if reduction.bucket.collective == "all_reduce":
            flat = flatten(self.new, grads, self.wire)
            # A bucket of one gradient is that gradient, not a copy: it may be read elsewhere.
            flat = mean_scaled(self.new, flat, self.wire, owned=len(grads) > 1)
            reduction.started = all_reduce(self.new, flat, self.wire)
        else:
            at = [self.layouts[param] for param in reduction.bucket.params]
            reduction.started = start_reduce_scatter(self.new, grads, at, self.wire)

    def _finish(self, reduction: _Reduction) -> None:
        assert reduction.started is not None
        at = [self.layouts[param] for param in reduction.bucket.params]
        templates = [self.new_of[self.params[param]] for param in reduction.bucket.params]
        if reduction.bucket.collective == "all_reduce":
            flat = wait(self.new, reduction.started)
            results = unflatten(self.new, flat, [layout.shape for layout in at], templates, self.wire)
        else:
            results = finish_reduce_scatter(self.new, reduction.started, at, templates, self.wire)
        for marker, result in zip(reduction.markers, results, strict=True):
            self.new_of[marker] = result

    def _flush(self) -> None:
        for reduction in list(self.open.values()):
            self._start(reduction)
        for node in self.put_off:
            self._emit(node)
        for reduction in self.reductions:
            # A gradient that nobody reads is reduced all the same: another rank may read its own.
            if reduction.markers[0] not in self.new_of:
                self._finish(reduction)
        self.put_off, self.late, self.late_reads, self.late_writes = [], set(), set(), set()
