"""Sharding of a traced step: from the program of whole tensors to that of one rank, which holds shards.

The step is traced on whole parameters, so that sizes, writes and views are those of the user's code. This pass gives
every rank the shards of parameters, gradients and optimizer states, and decides for each operation on them:

- Elementwise operations outside of differentiable code (optimizers, clipping) work on the shards.
- Reductions of all elements work on the shards, and an all_reduce combines the partial results.
- All others work on the whole tensor, gathered from the shards. What they write is copied back to the shard.

A shard may be in use under several views. A `ShardBase` stands for the memory: it counts the writes, and a view is
computed again from the gathered tensor after each of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_testing_ext._torch.spmd import storage_key, tree

from ..param_layout import Layout
from ..spmd_errors import SPMDError
from ..trace.markers import GATHER, GRAD_SYNC, SCATTER_GRAD
from ..trace.trace_modes import written_arguments
from ..trace.tracing import InputSource
from .buckets import c10d
from .graphs import call, is_operation, is_view, operand, param_of, writes
from .shard_rules import (
    FOREACH_REDUCTIONS,
    LIKE,
    NEW,
    NORMS,
    REDUCTIONS,
    STRUCTURAL,
    WIDE,
    WITHOUT_DIM,
    PartialValue,
    is_by_lists,
    is_elementwise,
    neutral_value,
    op_name,
    partial_kind,
    reduction_kind,
    rows_conform,
    same_rows,
)
from .uniformity import LocalValues

_tree = tree()
aten = torch.ops.aten


@dataclass
class ShardBase:
    """The memory of one sharded tensor: this rank's shard, and what was gathered from it."""

    layout: Layout
    shard: fx.Node  # in the new graph
    geometry: tuple[Any, ...]
    index: int  # of the layout
    trainable: bool = False  # a parameter, which differentiable code uses as a whole
    version: int = 0
    gathered: tuple[int, fx.Node] | None = None  # the version, and the whole tensor
    views: dict[fx.Node, tuple[int, fx.Node]] = field(default_factory=dict)


def _geometry(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype


class ShardedGraph:
    """The pass over one graph. `run` returns the new graph; `layouts` and `names` get an entry for each new shard."""

    def __init__(
        self,
        graph: fx.Graph,
        sources: list[InputSource],
        layouts: list[Layout],
        names: list[str],
        state_layout: dict[InputSource, int],
        trainable: list[bool],
        group: str,
        local: LocalValues,
        sharded_outputs: dict[int, int],
        free_outputs: set[int],
    ) -> None:
        self.old, self.new = graph, fx.Graph()
        self.sources, self.state_layout, self.group, self.local = sources, state_layout, group, local
        self.layouts, self.names, self.trainable = list(layouts), list(names), trainable
        self.sharded_outputs = sharded_outputs  # outputs that must be shards -> the parameter
        self.free_outputs = free_outputs  # outputs that may be shards
        self.phase = False  # whether the current node belongs to backward
        self.output_layouts: dict[int, Layout] = {}
        self.written = set().union(*(writes(node) for node in graph.nodes))
        self.plain: dict[fx.Node, fx.Node] = {}  # old node -> new node, for values that every rank has whole
        self.partial: dict[fx.Node, tuple[fx.Node, PartialValue]] = {}
        self.elements: dict[fx.Node, list[tuple[fx.Node, Layout | PartialValue | None]]] = {}
        self.bases: dict[int, ShardBase] = {}  # by the storage in the old graph

    def run(self) -> fx.Graph:
        sources = iter(self.sources)
        for node in self.old.nodes:
            if node.op == "placeholder":
                self._input(node, next(sources))
            elif node.op == "output":
                self.new.output([self._output(i, value) for i, value in enumerate(node.args[0])])
            else:
                self._visit(node)
        return self.new

    # -- inputs and outputs

    def _input(self, node: fx.Node, source: InputSource) -> None:
        new = self.new.node_copy(node)
        param = source.i if source.kind in ("param", "grad") else self.state_layout.get(source)
        if param is None or not self.layouts[param].sharded:
            self.plain[node] = new
            return
        value = node.meta["val"]
        with value.fake_mode:
            new.meta["val"] = torch.empty(self.layouts[param].local_shape, dtype=value.dtype, device=value.device)
        self._add_base(node, new, param, trainable=source.kind == "param" and self.trainable[param])

    def _output(self, i: int, old: Any) -> Any:
        if not isinstance(old, fx.Node):
            return old
        base = self._base_of(old)
        param = self.sharded_outputs.get(i)
        fits = i in self.free_outputs if param is None else base is not None and base.layout == self.layouts[param]
        if base is not None and fits and self._is_direct(old, base):
            self.output_layouts[i] = base.layout
            return base.shard
        whole = self._whole(old)
        if param is None:
            return whole
        self.output_layouts[i] = self.layouts[param]
        return self._like(whole, aten.clone.default, self._rows(whole, self.layouts[param]))

    # -- bases

    def _add_base(self, old: fx.Node, shard: fx.Node, index: int, trainable: bool = False) -> ShardBase:
        value = old.meta["val"]
        base = ShardBase(self.layouts[index], shard, _geometry(value), index, trainable)
        self.bases[storage_key(value)] = base
        return base

    def _add_shard(self, old: fx.Node, shard: fx.Node, like: ShardBase | None = None) -> None:
        """Register a new sharded value, the result of an operation."""
        shape = torch.Size(old.meta["val"].shape)
        if like is not None and like.layout.shape == shape:
            self._add_base(old, shard, like.index)
            return
        first = self.layouts[0]
        self.layouts.append(Layout(shape, True, first.rank, first.world))
        self.names.append(old.name)
        self._add_base(old, shard, len(self.layouts) - 1)

    def _base_of(self, old: fx.Node) -> ShardBase | None:
        value = old.meta.get("val")
        if isinstance(value, (list, tuple)) and value and old not in self.elements:
            value = value[0]  # views, all of one tensor
        return self.bases.get(storage_key(value)) if isinstance(value, torch.Tensor) else None

    def _is_direct(self, old: fx.Node, base: ShardBase) -> bool:
        value = old.meta["val"]
        return isinstance(value, torch.Tensor) and _geometry(value) == base.geometry

    # -- whole values

    def _whole(self, old: fx.Node) -> fx.Node:
        """The new node with the whole value of `old`."""
        base = self._base_of(old)
        if base is None:
            if old in self.partial:
                self.plain[old] = self._combine(*self.partial.pop(old), old.meta["val"].dtype)
            return self.plain[old]
        if self._is_direct(old, base):
            return self._gather(base)
        known = base.views.get(old)
        if known is None or known[0] != base.version:
            known = base.views[old] = base.version, self._whole_view(old, base)
        return known[1]

    def _gather(self, base: ShardBase) -> fx.Node:
        if base.gathered is None or base.gathered[0] != base.version:
            whole = self._like(base.shard, GATHER, base.shard, base.index, list(base.layout.shape))
            whole.meta["backward"] = self.phase
            base.gathered = base.version, whole
        return base.gathered[1]

    def _whole_view(self, old: fx.Node, base: ShardBase) -> fx.Node:
        if not is_view(old) and old.target is not operator.getitem:  # the result of an operation in place
            aliases = [arg for arg in old.all_input_nodes if self._base_of(arg) is base]
            geometry = _geometry(old.meta["val"])
            same = [arg for arg in aliases if _geometry(arg.meta["val"]) == geometry]
            return self._whole((same or aliases)[0])
        args, kwargs = fx.node.map_arg((old.args, old.kwargs), self._whole)
        return call(self.new, old, old.target, *args, **kwargs)  # type: ignore[arg-type]

    def _rows(self, whole: fx.Node, layout: Layout) -> fx.Node:
        return self._like(whole, aten.slice.Tensor, whole, 0, *layout.rows)

    # -- one operation

    def _visit(self, node: fx.Node) -> None:
        self.phase = bool(node.meta.get("backward"))
        inputs = node.all_input_nodes
        if node.target is GRAD_SYNC and self.layouts[param_of(node)].sharded:
            param = param_of(node)
            shape = list(self.layouts[param].local_shape)
            scattered = self._like(node, SCATTER_GRAD, self._whole(operand(node)), param, shape)
            self._add_base(node, scattered, param)
        elif node.target is operator.getitem and operand(node) in self.elements:
            self._visit_element(node)
        elif any(arg in self.partial for arg in inputs) and self._visit_partial(node):
            pass
        elif all(self._base_of(arg) is None for arg in inputs):
            self._copy(node)
        elif self._base_of(node) is not None and not self._is_mutable(node):
            pass  # a view, computed where it is used
        elif op_name(node) in NEW:
            shard = self._base_of(operand(node))
            args = [shard.shard if shard is not None else self._whole(operand(node)), *node.args[1:]]
            rest, kwargs = fx.node.map_arg((tuple(args[1:]), node.kwargs), self._whole)
            self.plain[node] = call(self.new, node, node.target, args[0], *rest, **kwargs)  # type: ignore[arg-type]
            self.plain[node].meta["val"] = node.meta["val"]
        elif not self._visit_local(node):
            self._visit_whole(node)

    def _is_mutable(self, node: fx.Node) -> bool:
        return is_operation(node) and bool(node.target._schema.is_mutable)  # type: ignore[union-attr]

    def _copy(self, node: fx.Node) -> None:
        self.plain[node] = self.new.node_copy(node, self._whole)

    def _visit_element(self, node: fx.Node) -> None:
        new, kind = self.elements[operand(node)][node.args[1]]  # type: ignore[index]
        if kind is None:
            self.plain[node] = new
        elif isinstance(kind, PartialValue):
            self._add_partial(node, new, kind)
        else:
            self._add_shard(node, new)

    def _visit_whole(self, node: fx.Node) -> None:
        """Compute `node` from whole tensors, and copy back what it writes to shards."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._whole)
        written = self._written_bases(node)
        if written and torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            raise SPMDError(
                f"The step changes the shape of a tensor that is sharded, by {op_name(node)}.",
                remedy="Use a view (t(), unsqueeze(), ...) in its place.",
                where=node.meta.get("where"),
            )
        new = call(self.new, node, node.target, *args, **kwargs)  # type: ignore[arg-type]
        if not self._is_mutable(node):
            new.meta["val"] = node.meta["val"]
        if self._base_of(node) is None:
            self.plain[node] = new
        for base in written:
            whole = self._gather(base)
            whole.meta["written"] = True
            self._like(new, aten.copy_.default, base.shard, self._rows(whole, base.layout))
            before, base.version = base.version, base.version + 1
            base.gathered = base.version, whole
            base.views = {old: (base.version, view) for old, (v, view) in base.views.items() if v == before}

    def _written_bases(self, node: fx.Node) -> list[ShardBase]:
        if not self._is_mutable(node):
            return []
        leaves = _tree.tree_leaves(written_arguments(node.target, node.args, node.kwargs))
        bases = [self._base_of(leaf) for leaf in leaves if isinstance(leaf, fx.Node)]
        return list({id(base): base for base in bases if base is not None}.values())

    # -- operations on shards

    def _visit_local(self, node: fx.Node) -> bool:
        """Emit `node` on shards if that gives the shards, or partial results, of the whole; return whether it does."""
        name = op_name(node)
        used = [(arg, base) for arg in node.all_input_nodes if (base := self._base_of(arg)) is not None]
        if not all(self._is_direct(arg, base) for arg, base in used) or self._prefers_whole(node, used):
            return False
        if any(self.local.is_local(arg) for arg in node.all_input_nodes):
            return False
        if name in FOREACH_REDUCTIONS:
            return self._visit_foreach_reduction(node)
        if name in REDUCTIONS or name in NORMS:
            return self._visit_reduction(node, name)
        if is_by_lists(node):
            return self._visit_lists(node)
        return is_elementwise(node) and self._visit_elementwise(node, used)

    def _prefers_whole(self, node: fx.Node, used: list[tuple[fx.Node, ShardBase]]) -> bool:
        differentiable = node.meta.get("grad_mode") or node.meta.get("backward")
        return bool(differentiable) and op_name(node) not in LIKE and any(base.trainable for _, base in used)

    def _visit_elementwise(self, node: fx.Node, used: list[tuple[fx.Node, ShardBase]]) -> bool:
        first, value = used[0][1], node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not rows_conform(first.layout.shape, value.shape):
            return False
        if not all(same_rows(first.layout, base.layout) for _, base in used):
            return False
        written = _tree.tree_leaves(written_arguments(node.target, node.args, node.kwargs))
        if any(self._base_of(arg) is None for arg in written):
            return False
        if not written and storage_key(value) in self.local.storages:
            return False
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda old: self._operand(old, first.layout))
        new = call(self.new, node, node.target, *args, **kwargs)  # type: ignore[arg-type]
        if not written:
            self._add_shard(node, new, first)
        for arg in written:
            self._base_of(arg).version += 1  # type: ignore[union-attr]
        return True

    def _operand(self, old: fx.Node, layout: Layout | None) -> fx.Node:
        """The new node for an operand: the shard, the rows of a whole tensor that belong to it, or the whole."""
        base = self._base_of(old)
        if base is not None and layout is not None:
            return base.shard
        whole, shape = self._whole(old), _shape(old)
        if layout is not None and len(shape) == len(layout.shape) and shape[0] == layout.shape[0]:
            return self._rows(whole, layout)
        return whole

    def _visit_lists(self, node: fx.Node) -> bool:
        lists = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, (list, tuple)) and a]
        lists = [arg for arg in lists if isinstance(arg[0], fx.Node)]
        length = max(map(len, lists))
        mutable = self._is_mutable(node)
        mapping: dict[fx.Node, Layout] = {}
        kinds: list[ShardBase | None] = []
        for i in range(length):
            operands = [arg[i] for arg in lists if len(arg) == length]
            first = next((base for base in map(self._base_of, operands) if base is not None), None)
            kinds.append(first)
            if first is None:
                continue
            if any(_shape(o) != first.layout.shape and len(_shape(o)) > 0 for o in operands):
                return False
            if mutable and self._base_of(operands[0]) is None:
                return False
            mapping.update(dict.fromkeys(operands, first.layout))
        in_lists = set().union(*(arg for arg in lists if len(arg) == length))
        if any(self._base_of(arg) is not None for arg in node.all_input_nodes if arg not in in_lists):
            return False
        written = self._written_bases(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda old: self._operand(old, mapping.get(old)))
        new = call(self.new, node, node.target, *args, **kwargs)  # type: ignore[arg-type]
        for base in written:
            base.version += 1
        if not mutable:
            self._add_elements(node, new, [None if base is None else base.layout for base in kinds])
        elif isinstance(node.meta.get("val"), (list, tuple)):
            self.plain[node] = new
        return True

    def _add_elements(self, node: fx.Node, new: fx.Node, kinds: list[Any]) -> None:
        elements = [self._like(new, operator.getitem, new, i) for i in range(len(kinds))]
        self.elements[node] = list(zip(elements, kinds, strict=True))

    # -- reductions, and partial results

    def _visit_reduction(self, node: fx.Node, name: str) -> bool:
        bases = [self._base_of(arg) for arg in node.all_input_nodes]
        first = bases[0]
        if first is None or any(b is None or b.layout.shape != first.layout.shape for b in bases):
            return False
        kind = reduction_kind(node, len(first.layout.shape))
        if kind is None or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        if kind.how in ("max", "min") and _is_empty(first.layout) and name not in ("any", "all"):
            shape = list(node.meta["val"].shape)
            dtype = node.meta["val"].dtype
            new = self._neutral(first.shard, kind, name in NORMS, shape, dtype)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda old: self._summand(self._base_of(old)))
            target: Any = node.target
            if name == "mean":
                target = aten.sum.default if target is aten.mean.default else aten.sum.dim_IntList
            new = self._like(node, target, *args, **kwargs)
            if name == "mean":
                new = self._like(node, aten.div.Tensor, new, first.layout.shape.numel())
        self._add_partial(node, new, kind)
        return True

    def _visit_foreach_reduction(self, node: fx.Node) -> bool:
        target: Any = node.target
        tensors: Any = node.args[0]
        kind = reduction_kind(node, 1)
        assert kind is not None
        bases = [self._base_of(arg) for arg in tensors]
        parts = [self._whole(a) if b is None else self._summand(b) for a, b in zip(tensors, bases, strict=True)]
        kinds = [None if base is None else kind for base in bases]
        if kind.how == "sum" or kind.how == "norm" or not any(b is not None and _is_empty(b.layout) for b in bases):
            self._add_elements(node, self._like(node, target, parts, *node.args[1:], **node.kwargs), kinds)
            return True
        is_norm, single = op_name(node) == "_foreach_norm", WITHOUT_DIM[target]
        results = [
            self._neutral(part, kind, is_norm, [])
            if base is not None and _is_empty(base.layout)
            else self._like(part, single, part, *node.args[1:])
            for part, base in zip(parts, bases, strict=True)
        ]
        self.elements[node] = list(zip(results, kinds, strict=True))
        return True

    def _summand(self, base: ShardBase | None) -> fx.Node:
        assert base is not None
        floating = base.shard.meta["val"].dtype.is_floating_point
        return self._widened(base.shard) if floating else base.shard

    def _neutral(
        self, like: fx.Node, kind: PartialValue, is_norm: bool, shape: list[int], dtype: torch.dtype | None = None
    ) -> fx.Node:
        dtype = dtype or like.meta["val"].dtype
        return self._like(like, aten.new_full.default, like, shape, neutral_value(kind, is_norm, dtype), dtype=dtype)

    def _add_partial(self, node: fx.Node, new: fx.Node, kind: PartialValue) -> None:
        if storage_key(node.meta["val"]) in self.written:
            self.plain[node] = self._combine(new, kind, node.meta["val"].dtype)
        else:
            self.partial[node] = new, kind

    def _visit_partial(self, node: fx.Node) -> bool:
        """Emit `node` on partial results, to be combined later and only once, if it can work on them."""
        name = op_name(node)
        inputs = node.all_input_nodes
        kinds = {self.partial[arg][1] for arg in inputs if arg in self.partial}
        if len(kinds) != 1 or any(self._base_of(arg) is not None or arg in self.elements for arg in inputs):
            return False
        (kind,) = kinds
        others = [arg for arg in inputs if arg not in self.partial]
        if name in STRUCTURAL:
            if not all(self._can_split(arg, kind) for arg in others):
                return False
            result: PartialValue | None = kind
        else:
            result = partial_kind(node, kind, not others)
        if result is None:
            return False
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda old: self._part(old, kind))
        target: Any = node.target
        new = self._like(node, target, *args, **kwargs)
        if name == "unbind":
            self._add_elements(node, new, [kind] * len(node.meta["val"]))
        else:
            self._add_partial(node, new, result)
        return True

    def _can_split(self, arg: fx.Node, kind: PartialValue) -> bool:
        value = arg.meta.get("val")
        if not isinstance(value, torch.Tensor) or self.local.is_local(arg):
            return False
        return kind.how in ("max", "min") or value.dtype.is_floating_point

    def _part(self, old: fx.Node, kind: PartialValue) -> fx.Node:
        """The partial result of `old`; an equal part of it if every rank has it whole."""
        if old in self.partial:
            return self.partial[old][0]
        whole = self._whole(old)
        if kind.how in ("max", "min"):
            return whole
        share = self.layouts[0].world ** (-1.0 / (kind.order if kind.how == "norm" else 1.0))
        return self._like(whole, aten.mul.Tensor, whole, share)

    def _combine(self, node: fx.Node, kind: PartialValue, dtype: torch.dtype) -> fx.Node:
        value = self._widened(node)
        if kind.how == "norm" and kind.order != 1:
            value = self._like(node, aten.pow.Tensor_Scalar, value, kind.order)
        how = "sum" if kind.how == "norm" else kind.how
        reduced = self._like(node, c10d.all_reduce.default, value, how, self.group)
        value = self._like(node, c10d.wait_tensor.default, reduced)
        if kind.how == "norm" and kind.order != 1:
            value = self._like(node, aten.pow.Tensor_Scalar, value, 1.0 / kind.order)
        same = value.meta["val"].dtype == dtype
        return value if same else self._like(node, aten._to_copy.default, value, dtype=dtype)

    def _widened(self, node: fx.Node) -> fx.Node:
        """`node` in a dtype in which partial results can be combined, and without rounding each of them."""
        wide = WIDE.get(node.meta["val"].dtype)
        return node if wide is None else self._like(node, aten._to_copy.default, node, dtype=wide)

    def _like(self, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.new, like, target, *args, **kwargs)


def _shape(node: fx.Node) -> torch.Size:
    value = node.meta.get("val")
    return value.shape if isinstance(value, torch.Tensor) else torch.Size()


def _is_empty(layout: Layout) -> bool:
    return layout.local_shape.numel() == 0
