"""Lowering of gradient markers to buckets, in the order in which gradients become ready.

A collective starts as soon as its gradients are ready; the wait for it comes where its result is first used. All that
follows the last gradient is sorted by the buckets that it needs: the parameters of the first bucket are updated while
the other buckets are on their way.
"""

from collections.abc import Callable

from torch import fx

from ..engine.bucket_plan import plan_buckets
from ..param_layout import Layout
from .buckets import Bucket, CollectiveOptions, finish_mean, start_mean
from .direct import is_large
from .graphs import AVERAGE, SCATTER, operand, placeholders, reads, storages, writes

_MARKERS = (AVERAGE, SCATTER)


def schedule_gradients(
    old: fx.Graph, layouts: list[Layout], names: list[str], options: CollectiveOptions
) -> tuple[fx.Graph, list[Bucket]]:
    scheduler = _Scheduler(old, layouts, options)
    scheduler.plan(names)
    return scheduler.run(), scheduler.buckets


class _Scheduler:
    def __init__(self, old: fx.Graph, layouts: list[Layout], options: CollectiveOptions) -> None:
        self.old, self.layouts, self.options = old, layouts, options
        self.markers = [node for node in old.nodes if node.target in _MARKERS]
        self.new = fx.Graph()
        self.new_of: dict[fx.Node, fx.Node] = {}
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[fx.Node, Bucket] = {}
        self.params = placeholders(old)  # parameters are the first inputs

    def plan(self, names: list[str]) -> None:
        """Put the gradients into buckets. Those that the program can write directly to a bucket come first in it."""
        grads = [operand(marker).meta["val"] for marker in self.markers]
        generation = self._generations()
        sizes = [grad.nbytes for grad in grads]
        kinds = [(m.target, g.dtype, generation[m]) for m, g in zip(self.markers, grads, strict=True)]
        for numbers in plan_buckets(sizes, kinds, self.options.limit(grads)):
            averages = self.markers[numbers[0]].target is AVERAGE
            numbers.sort(key=lambda i: averages and not is_large(grads[i]))
            bucket = Bucket("all_reduce" if averages else "reduce_scatter", grads[numbers[0]].dtype)
            for i in numbers:
                bucket.add(self.markers[i], names, sizes[i])
                self.bucket_of[self.markers[i]] = bucket
            self.buckets.append(bucket)

    def _generations(self) -> dict[fx.Node, int]:
        """Number the markers so that no mean is needed before all gradients of its number are ready."""
        found: dict[fx.Node, int] = {}
        number, current = 0, set()
        for node in self.old.nodes:
            if node.target in _MARKERS:
                found[node] = number
                current.add(node)
            elif not current.isdisjoint(node.all_input_nodes):
                number, current = number + 1, set()
        return found

    def run(self) -> fx.Graph:
        nodes = list(self.old.nodes)
        end = nodes.index(self.markers[-1]) + 1 if self.markers else len(nodes) - 1
        ready: set[fx.Node] = set()
        for node in nodes[:end]:
            if node.target in _MARKERS:
                ready.add(node)
                if ready.issuperset(self.bucket_of[node].markers):
                    self._start(self.bucket_of[node])
            else:
                self._emit(node)
        for node in self._by_bucket(nodes[end:-1]):
            self._emit(node)
        for bucket in self.buckets:  # one that this rank does not read is needed by others
            self._finish(bucket)
        self._emit(nodes[-1])
        return self.new

    def _emit(self, node: fx.Node) -> None:
        self.new_of[node] = self.new.node_copy(node, self._result)

    def _result(self, node: fx.Node) -> fx.Node:
        """The new node for an old one; for a marker, wait for its bucket first."""
        if node not in self.new_of:
            self._finish(self.bucket_of[node])
        return self.new_of[node]

    def _start(self, bucket: Bucket) -> None:
        grads = [self._result(operand(marker)) for marker in bucket.markers]
        bucket.started = start_mean(self.new, grads, bucket.markers[0].target is SCATTER, self.options)

    def _finish(self, bucket: Bucket) -> None:
        if bucket.markers[0] not in self.new_of:
            assert bucket.started is not None
            params = [self.new_of[self.params[param]] for param in bucket.params]
            layouts = [self.layouts[param] for param in bucket.params]
            scatter = bucket.markers[0].target is SCATTER
            results = finish_mean(self.new, bucket.started, layouts, params, scatter)
            self.new_of.update(zip(bucket.markers, results, strict=True))

    def _by_bucket(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Sort nodes by the last bucket that they need, directly or through values and memory.

        Nodes that need none come right before the first one that needs them, while their values are in the cache.
        """
        number = {marker: i for i, bucket in enumerate(self.buckets) for marker in bucket.markers}
        memory = {node: (reads(node) | storages(node), writes(node)) for node in nodes}
        for order, extreme in ((nodes, max), (nodes[::-1], min)):
            write: dict[int, int] = {}  # storage -> the last bucket that a node which writes to it needs
            access: dict[int, int] = {}
            for node in order:
                read, written = memory[node]
                if number.get(node, -1) < 0:
                    around = node.all_input_nodes if extreme is max else node.users
                    found = [number[other] for other in around if other in number]
                    found += [write[storage] for storage in read if storage in write]
                    found += [access[storage] for storage in written if storage in access]
                    number[node] = extreme(found, default=-1)
                _widen(access, read | written, number[node], extreme)
                _widen(write, written, number[node], extreme)
        return sorted(nodes, key=number.__getitem__)


def _widen(bounds: dict[int, int], keys: set[int], value: int, extreme: Callable[..., int]) -> None:
    for key in keys:
        bounds[key] = extreme(bounds.get(key, value), value)
