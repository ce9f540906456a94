"""Turns the graph of the local program into a data-parallel one."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from torch_testing_ext._torch.tracing import storage_key, tree

from .gradient_buckets import bucket_limit, plan_buckets
from .parallel_modes import Layout

# --------------------------------------------------------------------------------------------------------------------
# Graphs: the storages that a node reads and writes, new nodes with their fake values, and markers.
#
# Markers stand in a recorded graph where it needs the other ranks, until they are lowered. They compute nothing: each
# returns a new tensor of the right shape, and only while a step is recorded.

_tree = tree()
# Random operations must keep their order, so the generator counts as a storage that each of them reads and writes.
GENERATOR = -1


def call(graph: Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    node = graph.call_function(target, args, kwargs)
    if not isinstance(target, torch._ops.OpOverload) or target._schema.returns:
        refresh_fake_value(node)
    return node


def refresh_fake_value(node: Node) -> None:
    """Compute the fake value of `node` from those of its arguments."""
    target: Any = node.target
    args, kwargs = map_aggregate((node.args, node.kwargs), _fake_value)
    modes = [leaf.fake_mode for leaf in _tree.tree_leaves((args, kwargs)) if hasattr(leaf, "fake_mode")]
    mode = modes[0] if modes else contextlib.nullcontext()
    with mode, torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)


def _fake_value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def storages(node: Node) -> set[int]:
    """The memory of the value of a node."""
    leaves = _tree.tree_leaves(node.meta.get("val"))
    return {storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}


def storages_read(node: Node) -> set[int]:
    """The memory of the arguments of a node."""
    of_arguments: set[int] = set().union(*map(storages, node.all_input_nodes))
    return of_arguments | {GENERATOR} if _draws(node) else of_arguments


def storages_written(node: Node) -> set[int]:
    """The memory of the arguments that a node writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return set()
    written = {GENERATOR} if _draws(node) else set()
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            for leaf in _tree.tree_leaves(given):
                if isinstance(leaf, Node):
                    written |= storages(leaf)
    return written


def _draws(node: Node) -> bool:
    """Does an operation draw random numbers? Attention, for example, does so only with dropout."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            if position < len(node.args):
                return bool(node.args[position] != 0)
            return bool(node.kwargs.get("dropout_p", argument.default_value) != 0)
    return True


def placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def is_collective(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional" and "wait_tensor" not in str(node.target)


def param_of(marker: Node) -> int:
    return marker.args[1]  # type: ignore[return-value]


def operand(node: Node) -> Node:
    return node.args[0]  # type: ignore[return-value]


# Untyped in torch.
_new_library: Any = torch.library.Library
_library = _new_library("torch_testing_ext_spmd", "FRAGMENT")


def _define(name: str, arguments: str) -> Any:
    _library.define(f"{name}({arguments}) -> Tensor")
    _library.impl(name, lambda tensor, _param, shape: tensor.new_empty(shape), "Meta")
    return getattr(torch.ops.torch_testing_ext_spmd, name).default


# Each takes a tensor, the number of its parameter, and the shape of the result.
AVERAGE = _define("average", "Tensor grad, int param, int[] shape")  # the mean of a gradient over ranks
# This rank's rows of the mean.
SCATTER = _define("scatter", "Tensor grad, int param, int[] shape")
# The whole tensor of all ranks' rows.
GATHER = _define("gather", "Tensor rows, int param, int[] shape")
# This rank's rows.
ROWS = _define("rows", "Tensor whole, int param, int[] shape")


# --------------------------------------------------------------------------------------------------------------------
# Buckets: the tensors that share one collective, and the operations that pack and unpack them.

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass
class CollectiveOptions:
    """The options that all collectives of a program share."""

    # The name of the process group.
    group: str
    world: int
    # The size limit of a bucket; None lets the program choose.
    bucket_bytes: int | None

    def limit(self, tensors: list[torch.Tensor]) -> int:
        """The largest size of a bucket of these tensors."""
        if self.bucket_bytes:
            return self.bucket_bytes
        has_accelerator = any(tensor.device.type != "cpu" for tensor in tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return bucket_limit(nbytes, has_accelerator)


@dataclass
class Bucket:
    """One collective, with the parameters whose data it carries, in order."""

    collective: str
    dtype: torch.dtype
    # In the recorded graph.
    markers: list[Node] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    nbytes: int = 0
    started: Node | None = None

    @property
    def params(self) -> list[int]:
        return [*map(param_of, self.markers)]

    def add(self, marker: Node, names: list[str], nbytes: int) -> None:
        self.markers.append(marker)
        self.names.append(names[param_of(marker)])
        self.nbytes += nbytes


def _pack(graph: Graph, tensors: list[Node]) -> Node:
    if len(tensors) > 1:
        return call(graph, aten.flatten_dense_tensors.default, tensors)
    flat = call(graph, aten.reshape.default, tensors[0], [-1])
    return call(graph, aten.cat.default, [flat])


def is_packed(node: Any) -> bool:
    """Is this one flat tensor, as packing makes it, with one user?"""
    if not isinstance(node, Node) or len(node.users) != 1:
        return False
    return node.target in (aten.flatten_dense_tensors.default, aten.cat.default) and len(node.args) == 1


def _unpack(graph: Graph, flat: Node, templates: list[Node]) -> list[Node]:
    """Views of `flat` in the shapes of `templates`, which are alive in any case."""
    views = call(graph, aten.unflatten_dense_tensors.default, flat, templates)
    return _items(graph, views, len(templates))


def _items(graph: Graph, tensors: Node, count: int) -> list[Node]:
    return [call(graph, operator.getitem, tensors, number) for number in range(count)]


def _split(graph: Graph, tensor: Node, sizes: list[int], dim: int, target: Any) -> list[Node]:
    if len(sizes) == 1:
        return [tensor]
    parts = call(graph, target, tensor, sizes, dim)
    return _items(graph, parts, len(sizes))


def _padded(graph: Graph, rows: Node, layout: Layout) -> Node:
    if layout.even:
        return rows
    # Two numbers for each dimension, the last one first.
    of_other_dimensions = [0, 0] * (len(layout.shape) - 1)
    missing = layout.chunk - layout.local_shape[0]
    return call(graph, aten.constant_pad_nd.default, rows, [*of_other_dimensions, 0, missing])


def start_mean(graph: Graph, grads: list[Node], scatter: bool, options: CollectiveOptions) -> Node:
    """Start to average gradients. Like in DDP they are divided first: the same rounding, and no overflow in half."""
    factor = 1.0 / options.world
    if scatter:
        flat = call(graph, aten._chunk_cat.default, grads, 0, options.world)
        scaled = call(graph, aten.mul_.Tensor, flat, factor)
        return call(graph, c10d.reduce_scatter_tensor.default, scaled, "sum", options.world, options.group)
    scaled = call(graph, aten.mul_.Tensor, _pack(graph, grads), factor)
    return call(graph, c10d.all_reduce_.default, scaled, "sum", options.group)


def finish_mean(graph: Graph, started: Node, layouts: list[Layout], params: list[Node], scatter: bool) -> list[Node]:
    """Wait, and return the mean gradients, or this rank's rows of them. `params` have their shapes."""
    flat = call(graph, c10d.wait_tensor.default, started)
    if not scatter:
        return _unpack(graph, flat, params)
    flat = call(graph, aten.view.default, flat, [-1])
    if all(layout.even for layout in layouts):
        return _unpack(graph, flat, params)
    sizes = [layout.padded_numel for layout in layouts]
    parts = _split(graph, flat, sizes, 0, aten.split_with_sizes.default)
    padded = []
    for part, layout in zip(parts, layouts, strict=True):
        padded.append(call(graph, aten.view.default, part, [layout.chunk, *layout.shape[1:]]))
    rows = []
    for part, layout in zip(padded, layouts, strict=True):
        rows.append(call(graph, aten.slice.Tensor, part, 0, 0, layout.local_shape[0]))
    return rows


def start_all_gather(graph: Graph, shards: list[Node], layouts: list[Layout], options: CollectiveOptions) -> Node:
    padded = [_padded(graph, shard, layout) for shard, layout in zip(shards, layouts, strict=True)]
    flat = _pack(graph, padded)
    return call(graph, c10d.all_gather_into_tensor.default, flat, options.world, options.group)


def finish_all_gather(graph: Graph, started: Node, layouts: list[Layout], world: int) -> list[Node]:
    flat = call(graph, c10d.wait_tensor.default, started)
    sizes = [layout.padded_numel for layout in layouts]
    # With a row for each rank.
    rows = flat
    if len(sizes) > 1:
        rows = call(graph, aten.view.default, flat, [world, sum(sizes)])
    parts = _split(graph, rows, sizes, 1, aten.split_with_sizes_copy.default)
    wholes = []
    for part, layout in zip(parts, layouts, strict=True):
        whole = call(graph, aten.view.default, part, [layout.chunk * world, *layout.shape[1:]])
        if not layout.even:
            whole = call(graph, aten.slice.Tensor, whole, 0, 0, layout.shape[0])
        wholes.append(whole)
    return wholes


# --------------------------------------------------------------------------------------------------------------------
# Removal of nodes that only the recording needed: detaches, pairs of transposes, copies, dead code and dead writes.

_ARITHMETIC = ("_operator", "math", "torch")
_SAME_TENSOR = {aten.detach.default, aten.alias.default}


def clean_graph(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target in _SAME_TENSOR:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default and operand(node).target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
        elif node.target is aten.copy_.default:
            _remove_copy_of_gradient(node)
        elif node.target is aten._local_scalar_dense.default and operand(node).op == "placeholder":
            _use_number(node)
    _remove_needless_pushes(graph)
    remove_dead_code(graph, with_writes=True)
    _use_known_rows(graph)
    remove_dead_code(graph, with_writes=True)


def _use_number(read: Node) -> None:
    """Let an input that is only read as a number be that number: a learning rate."""
    source = operand(read)
    if {*source.users} == {read} and source.meta.get("is_number"):
        source.meta["val"] = read.meta["val"]
        read.replace_all_uses_with(source)


def _remove_copy_of_gradient(copy: Node) -> None:
    """Use a gradient itself where autograd has copied it to a new tensor, and nothing else uses it."""
    new, grad = copy.args[:2]
    assert isinstance(new, Node)
    is_copy_to_new = new.target is aten.new_empty_strided.default and new.args[0] is grad
    if not is_copy_to_new or set(new.users) != {copy}:
        return
    assert isinstance(grad, Node)
    kept = copy.meta["val"]
    has_other_users = set(grad.users) != {new, copy}
    if has_other_users or grad.meta["val"].stride() != kept.stride() or not _is_own(grad):
        return
    copy.replace_all_uses_with(grad)
    copy.graph.erase_node(copy)
    copy.graph.erase_node(new)
    # Later nodes have this storage.
    grad.meta["val"] = kept


def _is_own(node: Node) -> bool:
    """Is the value of a node in memory of its own?"""
    if node.op != "call_function":
        return False
    own = storages(node)
    return all(own.isdisjoint(storages(argument)) for argument in node.all_input_nodes)


def _remove_needless_pushes(graph: Graph) -> None:
    """Do not copy a whole parameter back to its rows if nothing has written to it since it was gathered."""
    written: set[int] = set()
    for node in list(graph.nodes):
        value = node.args[1] if node.target is aten.copy_.default else None
        if not isinstance(value, Node):
            written |= storages_written(node)
        elif value.target is GATHER:
            written -= storages(operand(node))
        elif value.target is ROWS:
            whole = storages(operand(value))
            if not whole & written:
                node.replace_all_uses_with(operand(node))
                graph.erase_node(node)
            written -= whole
        else:
            written |= storages_written(node)


def _use_known_rows(graph: Graph) -> None:
    """Replace the rows of a gathered tensor that nothing has written by the rows that it was gathered from."""
    written = set().union(*map(storages_written, graph.nodes))
    for node in list(graph.nodes):
        if node.target is not ROWS:
            continue
        whole = operand(node)
        if whole.target is GATHER and not storages(whole) & written:
            node.replace_all_uses_with(operand(whole))


def remove_dead_code(graph: Graph, with_writes: bool = False) -> None:
    """Erase nodes without users and effects, in place; also writes to memory that nothing reads any more."""
    live = lasting_storages(graph) if with_writes else None
    for node in reversed(graph.nodes):
        if not node.users and not _has_effect(node, live):
            graph.erase_node(node)
        elif live is not None:
            live |= storages_read(node)


def lasting_storages(graph: Graph) -> set[int]:
    """The memory that a program shares with others: its inputs, captured tensors, the random generator."""
    given = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    return {GENERATOR}.union(*map(storages, given))


def _has_effect(node: Node, live: set[int] | None) -> bool:
    """Must a node stay even if no other node uses its value?"""
    if node.op != "call_function":
        return node.op in ("placeholder", "output", "call_module", "call_method")
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem and getattr(node.target, "__module__", "") not in _ARITHMETIC
    target = node.target
    if target.namespace == "profiler":
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return True
    if target._schema.is_mutable:
        return live is None or bool(storages_written(node) & live)
    return is_collective(node) or "assert" in target._schema.name


# --------------------------------------------------------------------------------------------------------------------
# Gradients that a program writes directly to their bucket, instead of to a tensor that is copied to it.
#
# A bucket begins with its large gradients. The operation that computes one of them writes to a view of the bucket if
# nothing else uses its result; otherwise the copy to the bucket also divides by the number of ranks, as in DDP. Fewer
# passes over memory, and no memory that each step has to get from the system: that costs more than the copies.

# In bytes; below, the views cost more than a copy.
_LARGE = 16 << 10
# In bytes; like a tensor of its own, so that kernels compute it in the same way.
_ALIGNMENT = 64
_WITH_OUT: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
}
_SAME_MEMORY = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def is_large(grad: torch.Tensor) -> bool:
    return grad.device.type == "cpu" and grad.nbytes >= _LARGE and grad.nbytes % _ALIGNMENT == 0


def write_to_buckets(module: GraphModule) -> None:
    """Change `module` in place, so that large gradients are not copied to their buckets."""
    for node in list(module.graph.nodes):
        if node.target is not c10d.all_reduce_.default:
            continue
        scaled = operand(node)
        if scaled.target is aten.mul_.Tensor and len(scaled.users) == 1 and is_packed(scaled.args[0]):
            _DirectBucket(module.graph, node, scaled).rewrite()
    module.recompile()


class _DirectBucket:
    """A bucket whose large gradients are written to it directly: `packed`, `scaled` and then reduced until now."""

    def __init__(self, graph: Graph, reduce: Node, scaled: Node):
        self.graph = graph
        self.reduce = reduce
        self.scaled = scaled
        self.factor = scaled.args[1]
        self.packed = operand(scaled)
        self.tensors: list[Any] = list(self.packed.args[0])  # type: ignore[arg-type]
        self.large = list(itertools.takewhile(lambda tensor: is_large(tensor.meta["val"]), self.tensors))
        # Of each large gradient: what computes it, if that can write to the bucket.
        self.chains = [_chain(tensor, self.packed, self.tensors) for tensor in self.large]

    def rewrite(self) -> None:
        """Replace the packing in the graph."""
        if not self.large:
            return
        flat, places = self._make_bucket()
        for tensor, chain, place in zip(self.large, self.chains, places, strict=False):
            if chain:
                self._write_directly(chain[-1], place)
            else:
                self._write_scaled(tensor, place)
        small = self.tensors[len(self.large) :]
        if len(places) > len(self.large):
            with self.graph.inserting_before(self.packed):
                rest = call(self.graph, aten.flatten_dense_tensors.default, small)
                call(self.graph, aten.mul.out, rest, self.factor, out=places[-1])
        self.reduce.replace_input_with(self.scaled, flat)
        for node in (self.scaled, self.packed, *itertools.chain.from_iterable(self.chains)):
            self.graph.erase_node(node)

    def _make_bucket(self) -> tuple[Node, list[Node]]:
        """The bucket, before the first node that writes to it, and its parts: large gradients, and all small ones."""
        bucket: torch.Tensor = self.packed.meta["val"]
        sizes = [tensor.meta["val"].numel() for tensor in self.large]
        rest = bucket.numel() - sum(sizes)
        if rest:
            sizes.append(rest)
        position = {node: number for number, node in enumerate(self.graph.nodes)}
        writers = [self.packed, *(chain[-1] for chain in self.chains if chain)]
        first = min(writers, key=position.__getitem__)
        with self.graph.inserting_before(first):
            like = next(arg for arg in first.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor))
            flat = call(self.graph, aten.new_empty.default, like, list(bucket.shape), dtype=bucket.dtype)
            # Later nodes have this storage.
            flat.meta["val"] = bucket
            parts = call(self.graph, aten.split_with_sizes.default, flat, sizes)
            places = [call(self.graph, operator.getitem, parts, number) for number in range(len(sizes))]
        return flat, places

    def _write_directly(self, source: Node, place: Node) -> None:
        """Let the operation that computes a gradient write to its place, and divide there: it is still in the cache."""
        with self.graph.inserting_before(source):
            view = call(self.graph, aten.view.default, place, list(source.meta["val"].shape))
            call(self.graph, _WITH_OUT[source.target], *source.args, **source.kwargs, out=view)
            call(self.graph, aten.mul_.Tensor, place, self.factor)

    def _write_scaled(self, tensor: Node, place: Node) -> None:
        """Copy a gradient to its place and divide it, in one pass."""
        with self.graph.inserting_before(self.packed):
            view = call(self.graph, aten.view.default, place, list(tensor.meta["val"].shape))
            call(self.graph, aten.mul.out, tensor, self.factor, out=view)


def _chain(tensor: Node, packed: Node, tensors: list[Node]) -> list[Node]:
    """`tensor`, the views that it is of, and the operation that can write to the bucket instead, if it may."""
    chain, user = [tensor], packed
    while tensors.count(tensor) == 1:
        node = chain[-1]
        if {*node.users} != {user} or not node.meta["val"].is_contiguous():
            break
        if node.target in _WITH_OUT:
            return chain
        if node.target not in _SAME_MEMORY:
            break
        user = node
        chain.append(operand(node))
    return []


# --------------------------------------------------------------------------------------------------------------------
# Lowering of gathers to bucketed all_gathers that overlap with computation.
#
# The all_gather of parameters starts at the first use of the previous bucket, and runs while that bucket is in use.


@dataclass
class _Gathering(Bucket):
    """A bucket of shards that are gathered together."""

    # The position of the last write to any of its shards.
    last_write: int = -1
    first_use: int = 0


def lower_gathers(graph: Graph, layouts: list[Layout], names: list[str], options: CollectiveOptions) -> list[Bucket]:
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


def _erase(graph: Graph, markers: list[Node]) -> None:
    """Erase markers that nothing uses any more, and compute the fake values of what were views of them."""
    replaced = set().union(*map(storages, markers))
    for marker in markers:
        graph.erase_node(marker)
    for node in graph.nodes:
        if storages(node) & replaced:
            refresh_fake_value(node)


def _lower_rows(graph: Graph, layouts: list[Layout]) -> None:
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


def _grouped(position: dict[Node, int], names: list[str], limit: int) -> list[_Gathering]:
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


def _writes_before(position: dict[Node, int]) -> dict[Node, int]:
    """For each marker, the position at which its shard was made or written last; -1 for an input that was not."""
    last_write: dict[int, int] = {}
    before: dict[Node, int] = {}
    for node, number in position.items():
        if node.target is GATHER:
            shard = operand(node)
            created = -1 if shard.op == "placeholder" else position[shard]
            written = [last_write.get(storage, -1) for storage in storages(shard)]
            before[node] = max(created, *written)
        for storage in storages_written(node):
            last_write[storage] = number
    return before


# --------------------------------------------------------------------------------------------------------------------
# Lowering of gradient markers to buckets, in the order in which gradients become ready.
#
# A collective starts as soon as its gradients are ready; the wait for it comes where its result is first used. All
# that follows the last gradient is sorted by the buckets that it needs: the parameters of the first bucket are
# updated while the other buckets are on their way.

_MARKERS = (AVERAGE, SCATTER)


def schedule_gradients(
    old: Graph, layouts: list[Layout], names: list[str], options: CollectiveOptions
) -> tuple[Graph, list[Bucket]]:
    scheduler = _Scheduler(old, layouts, options)
    scheduler.plan(names)
    return scheduler.run(), scheduler.buckets


class _Scheduler:
    def __init__(self, old: Graph, layouts: list[Layout], options: CollectiveOptions) -> None:
        self.old = old
        self.layouts = layouts
        self.options = options
        self.markers = [node for node in old.nodes if node.target in _MARKERS]
        self.new = Graph()
        self.new_of: dict[Node, Node] = {}
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[Node, Bucket] = {}
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

    def _generations(self) -> dict[Node, int]:
        """Number the markers so that no mean is needed before all gradients of its number are ready."""
        numbers: dict[Node, int] = {}
        number = 0
        current: set[Node] = set()
        for node in self.old.nodes:
            if node.target in _MARKERS:
                numbers[node] = number
                current.add(node)
            elif not current.isdisjoint(node.all_input_nodes):
                number += 1
                current = set()
        return numbers

    def run(self) -> Graph:
        """Make the new graph: start each bucket when it is full, and sort what follows the last gradient."""
        nodes = list(self.old.nodes)
        end = nodes.index(self.markers[-1]) + 1 if self.markers else len(nodes) - 1
        ready: set[Node] = set()
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

    def _emit(self, node: Node) -> None:
        self.new_of[node] = self.new.node_copy(node, self._result)

    def _result(self, node: Node) -> Node:
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

    def _by_bucket(self, nodes: list[Node]) -> list[Node]:
        """Sort nodes by the last bucket that they need, directly or through values and memory.

        Nodes that need none come right before the first one that needs them, while their values are in the cache.
        """
        numbers: dict[Node, int] = {}
        for number, bucket in enumerate(self.buckets):
            numbers.update(dict.fromkeys(bucket.markers, number))
        memory = {node: (storages_read(node) | storages(node), storages_written(node)) for node in nodes}
        # Forwards: a node needs the last bucket that one of those before it needs.
        _spread(nodes, memory, numbers, max, lambda node: node.all_input_nodes)
        # Backwards: a node that needs none belongs to the first bucket that one of those after it needs.
        _spread(nodes[::-1], memory, numbers, min, lambda node: node.users)
        return sorted(nodes, key=lambda node: numbers[node])


def _spread(
    nodes: list[Node],
    memory: Mapping[Node, tuple[set[int], set[int]]],
    numbers: dict[Node, int],
    extreme: Callable[..., int],
    neighbours: Callable[[Node], Iterable[Node]],
) -> None:
    """Give each node without a bucket the extreme one of its neighbours, and of those that use its memory; -1: none.

    `memory`: what each node reads, and what it writes.
    """
    # By storage: the bucket that a node needs which writes to it, or which reads or writes it.
    of_writer: dict[int, int] = {}
    of_user: dict[int, int] = {}
    for node in nodes:
        read, written = memory[node]
        if numbers.get(node, -1) < 0:
            needed = [numbers[other] for other in neighbours(node) if other in numbers]
            needed += [of_writer[storage] for storage in read if storage in of_writer]
            needed += [of_user[storage] for storage in written if storage in of_user]
            numbers[node] = extreme(needed, default=-1)
        _widen(of_user, read | written, numbers[node], extreme)
        _widen(of_writer, written, numbers[node], extreme)


def _widen(bounds: dict[int, int], keys: set[int], value: int, extreme: Callable[..., int]) -> None:
    for key in keys:
        bounds[key] = extreme(bounds.get(key, value), value)
