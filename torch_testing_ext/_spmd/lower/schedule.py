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
        self.old = old
        self.layouts = layouts
        self.options = options
        self.markers = [node for node in old.nodes if node.target in _MARKERS]
        self.new = fx.Graph()
        self.new_of: dict[fx.Node, fx.Node] = {}
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[fx.Node, Bucket] = {}
        # Parameters are the first inputs.
        self.params = placeholders(old)

    def plan(self, names: list[str]) -> None:
        """Put the gradients into buckets. Those that the program can write directly to a bucket come first in it."""
        grad_of = {marker: operand(marker).meta["val"] for marker in self.markers}
        grads = list(grad_of.values())
        generation = self._generations()
        sizes = [grad.nbytes for grad in grads]
        kinds = [(marker.target, grad.dtype, generation[marker]) for marker, grad in grad_of.items()]
        for numbers in plan_buckets(sizes, kinds, self.options.limit(grads)):
            markers = [self.markers[number] for number in numbers]
            if markers[0].target is AVERAGE:
                kind = "all_reduce"
                markers.sort(key=lambda marker: not is_large(grad_of[marker]))
            else:
                kind = "reduce_scatter"
            bucket = Bucket(kind, grad_of[markers[0]].dtype)
            for marker in markers:
                bucket.add(marker, names, grad_of[marker].nbytes)
                self.bucket_of[marker] = bucket
            self.buckets.append(bucket)

    def _generations(self) -> dict[fx.Node, int]:
        """Number the markers so that no mean is needed before all gradients of its number are ready."""
        numbers: dict[fx.Node, int] = {}
        number = 0
        current: set[fx.Node] = set()
        for node in self.old.nodes:
            if node.target in _MARKERS:
                numbers[node] = number
                current.add(node)
            elif not current.isdisjoint(node.all_input_nodes):
                number += 1
                current = set()
        return numbers

    def run(self) -> fx.Graph:
        """Make the new graph: start each bucket when it is full, and sort what follows the last gradient."""
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
        for bucket in self.buckets:
            # One that this rank does not read is needed by others.
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
        """Wait for a bucket, unless the new graph does already."""
        first = bucket.markers[0]
        if first in self.new_of:
            return
        assert bucket.started is not None
        params = [self.new_of[self.params[param]] for param in bucket.params]
        layouts = [self.layouts[param] for param in bucket.params]
        scatter = first.target is SCATTER
        results = finish_mean(self.new, bucket.started, layouts, params, scatter)
        self.new_of.update(zip(bucket.markers, results, strict=True))

    def _by_bucket(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Sort nodes by the last bucket that they need, directly or through values and memory.

        Nodes that need none come right before the first one that needs them, while their values are in the cache.
        """
        number = {marker: at for at, bucket in enumerate(self.buckets) for marker in bucket.markers}
        memory = {node: (reads(node) | storages(node), writes(node)) for node in nodes}
        for order, extreme in ((nodes, max), (nodes[::-1], min)):
            # By storage: the bucket that a node needs which writes to it, or which reads or writes it.
            of_writer: dict[int, int] = {}
            of_user: dict[int, int] = {}
            for node in order:
                read, written = memory[node]
                if number.get(node, -1) < 0:
                    around = node.all_input_nodes if extreme is max else node.users
                    needed = [number[other] for other in around if other in number]
                    needed += [of_writer[storage] for storage in read if storage in of_writer]
                    needed += [of_user[storage] for storage in written if storage in of_user]
                    number[node] = extreme(needed, default=-1)
                _widen(of_user, read | written, number[node], extreme)
                _widen(of_writer, written, number[node], extreme)
        return sorted(nodes, key=number.__getitem__)


def _widen(bounds: dict[int, int], keys: set[int], value: int, extreme: Callable[..., int]) -> None:
    for key in keys:
        bounds[key] = extreme(bounds.get(key, value), value)
