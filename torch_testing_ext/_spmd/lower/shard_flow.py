"""Following shards through the graph, so that no operation mistakes a shard for the whole parameter.

If parameters are sharded, the optimizer sees shards. Elementwise operations give the same result on a shard as on that
part of the whole, and stay local. Reductions over all elements (a norm, a sum, a maximum) give each rank a partial
result. Partial results are combined as late as possible, so that clipping by the norm of all gradients costs one small
all_reduce. All other operations would silently work on one shard only, and are refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from ..errors import SPMDError
from ..layout import Layout
from ..trace.markers import GATHER, NEUTRAL, SCATTER_GRAD
from ..trace.tracing import InputSource
from ..trace.watch import written_arguments
from .graphs import call, operand, param_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class ShardedValue:
    """A rank's part of a tensor with the layout of parameter `param`."""

    param: int
    shape: tuple[int, ...]  # of the whole


@dataclass(frozen=True)
class PartialValue:
    """A rank's partial result, to be combined over ranks by "sum", "max" or "min", or as a "norm" of order `order`."""

    how: str
    order: float = 0.0


_ELEMENTWISE = {
    "copy_", "copy", "clone", "_to_copy", "zero_", "fill_", "where", "masked_fill", "masked_fill_", "lerp", "lerp_",
    "addcmul", "addcmul_", "addcdiv", "addcdiv_", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
    "randn_like", "uniform_", "normal_", "bernoulli_", "bernoulli", "native_dropout", "isnan", "isinf", "isfinite",
    "_amp_foreach_non_finite_check_and_unscale_", "clamp", "clamp_", "sgn", "sign", "nan_to_num", "copysign",
}  # fmt: skip
_STRUCTURAL = {
    "stack",
    "cat",
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "_to_copy",
    "clone",
    "select",
    "unbind",
    "expand",
}
_REDUCTIONS = {
    "sum": "sum", "mean": "sum", "count_nonzero": "sum", "dot": "sum", "vdot": "sum", "max": "max", "amax": "max",
    "min": "min", "amin": "min", "any": "max", "all": "min",
}  # fmt: skip
_NORMS = {"linalg_vector_norm", "norm"}


def combine_across_shards(
    module: fx.GraphModule,
    sources: list[InputSource],
    layouts: list[Layout],
    state_layout: dict[InputSource, int],
    group: str,
) -> dict[fx.Node, ShardedValue]:
    """Rewrite reductions over shards in place, and return the nodes whose values are shards.

    `state_layout` maps the optimizer states that have a parameter's layout to that parameter.
    """
    return _ShardFlow(module.graph, sources, layouts, state_layout, group).run()


class _ShardFlow:
    def __init__(
        self,
        graph: fx.Graph,
        sources: list[InputSource],
        layouts: list[Layout],
        state_layout: dict[InputSource, int],
        group: str,
    ) -> None:
        self.graph, self.layouts, self.group = graph, layouts, group
        self.sources, self.state_layout = sources, state_layout
        # ShardedValue, PartialValue, None for a value that every rank has whole, or a list of these.
        self.kind_of: dict[fx.Node, Any] = {}
        self.combined: dict[fx.Node, fx.Node] = {}  # partial result -> combined result

    def run(self) -> dict[fx.Node, ShardedValue]:
        nodes = list(self.graph.nodes)
        for node, source in zip((n for n in nodes if n.op == "placeholder"), self.sources, strict=True):
            self.kind_of[node] = self._source_kind(source)
        for node in nodes:
            if node.op == "output":
                self._resolve_inputs(node)
            elif node.op != "placeholder":
                self.kind_of[node] = self._visit(node)
        return {node: kind for node, kind in self.kind_of.items() if isinstance(kind, ShardedValue)}

    def _source_kind(self, source: InputSource) -> ShardedValue | None:
        param = source.i if source.kind in ("param", "grad") else self.state_layout.get(source)
        return self._shard(param) if param is not None and self.layouts[param].sharded else None

    def _shard(self, param: int) -> ShardedValue:
        return ShardedValue(param, tuple(self.layouts[param].shape))

    def _lower_neutral(self, node: fx.Node) -> PartialValue:
        shard, value = operand(node), node.args[1]
        if self.kind_of.get(shard) is None:
            raise SPMDError(
                "The step computes the maximum or minimum of an empty tensor.",
                remedy="Give every rank a non-empty batch, or guard the reduction.",
                where=node.meta.get("where"),
            )
        node.target, node.args = aten.new_full.default, (shard, [], value)
        return PartialValue("max" if value in (0.0, -math.inf) else "min")

    # -- one operation

    def _visit(self, node: fx.Node) -> Any:
        if node.target is SCATTER_GRAD:
            return self._shard(param_of(node))
        if node.target is GATHER or node.op == "get_attr":
            return None
        if node.target is NEUTRAL:
            return self._lower_neutral(node)
        if node.target is operator.getitem:
            kind, position = self.kind_of.get(operand(node)), node.args[1]
            return kind[position] if isinstance(kind, list) and isinstance(position, int) else kind
        kinds = [self.kind_of.get(arg) for arg in node.all_input_nodes]
        flat = [each for kind in kinds for each in (kind if isinstance(kind, list) else [kind])]
        if any(isinstance(kind, PartialValue) for kind in flat):
            partial = self._visit_partial(node)
            if partial is not None:
                return partial
            self._resolve_inputs(node)
        if not any(isinstance(kind, ShardedValue) for kind in flat):
            return None
        return self._visit_sharded(node)

    def _visit_sharded(self, node: fx.Node) -> Any:
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._refuse(node)
        name = node.target._schema.name.removeprefix("aten::")
        if name in ("_foreach_norm", "_foreach_max"):
            return self._foreach_reduction(node, name)
        if name.startswith(("_foreach_", "_fused_")):
            return self._by_lists(node)
        if name in _REDUCTIONS or name in _NORMS:
            return self._reduction(node, name)
        if torch.Tag.pointwise in node.target.tags or name in _ELEMENTWISE:
            return self._elementwise(node, node.all_input_nodes)
        if name in ("sym_size", "sym_stride", "sym_numel"):
            return None
        return self._refuse(node)

    def _elementwise(self, node: fx.Node, operands: list[fx.Node]) -> ShardedValue:
        kinds = map(self.kind_of.get, operands)
        shards: dict[tuple[int, ...], ShardedValue] = {k.shape: k for k in kinds if isinstance(k, ShardedValue)}
        if len(shards) > 1:
            return self._refuse(node)
        (shard,) = shards.values()
        ndim = len(shard.shape)
        for arg in operands:
            value = arg.meta.get("val")
            if self.kind_of.get(arg) is None and isinstance(value, torch.Tensor) and value.dim() > ndim:
                return self._refuse(node)
        for written in written_arguments(node.target, node.args, node.kwargs):
            if isinstance(written, fx.Node) and self.kind_of.get(written) is None:
                return self._refuse(node)
        return shard

    def _by_lists(self, node: fx.Node) -> list[Any] | None:
        """Foreach and fused operations: the i-th tensors of all lists belong together."""
        lists = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, (list, tuple)) and arg]
        lists = [arg for arg in lists if isinstance(arg[0], fx.Node)]
        length = max(len(arg) for arg in lists)
        out: list[Any] = []
        for i in range(length):
            operands = [arg[i] for arg in lists if len(arg) == length]
            shapes = {t.shape for t in map(self.kind_of.get, operands) if isinstance(t, ShardedValue)}
            first = self.kind_of.get(operands[0])
            if len(shapes) > 1 or (shapes and first is None and node.target._schema.is_mutable):  # type: ignore[union-attr]
                return self._refuse(node)
            out.append(next((t for t in map(self.kind_of.get, operands) if isinstance(t, ShardedValue)), None))
        return out

    # -- reductions

    def _reduction(self, node: fx.Node, name: str) -> PartialValue | None:
        operands = node.all_input_nodes
        shard = self._elementwise(node, operands)
        if len({self.kind_of.get(arg) is None for arg in operands}) > 1:
            return self._refuse(node)
        arguments = _arguments_by_name(node)
        dims = arguments.get("dim")
        if dims is not None and dims != []:
            dims = [dims] if isinstance(dims, int) else list(dims)
            if {d % len(shard.shape) for d in dims} != set(range(len(shard.shape))):
                return self._refuse(node)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return self._refuse(node)  # max(dim) and others also return indices
        if name in _NORMS:
            order = arguments.get("ord", arguments.get("p"))
            return _norm(2.0 if order is None else float(order))
        how = _REDUCTIONS[name]
        if name == "mean":
            self._mean(node, math.prod(shard.shape))
        return PartialValue(how)

    def _foreach_reduction(self, node: fx.Node, name: str) -> list[Any]:
        kind = PartialValue("max") if name == "_foreach_max" else _norm(float(_arguments_by_name(node).get("ord", 2.0)))
        tensors: Any = node.args[0]
        return [kind if isinstance(self.kind_of.get(arg), ShardedValue) else None for arg in tensors]

    def _mean(self, node: fx.Node, numel: int) -> None:
        node.target = aten.sum.default if node.target is aten.mean.default else aten.sum.dim_IntList
        with self.graph.inserting_after(node):
            scaled = self._like(node, aten.div.Tensor, node, numel)
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        self.kind_of[scaled] = PartialValue("sum")

    # -- partial results

    def _visit_partial(self, node: fx.Node) -> Any:
        """The kind of `node` if it can work on partial results, to be combined later and only once; else None."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        name = node.target._schema.name.removeprefix("aten::")
        kinds = {self.kind_of.get(arg) for arg in node.all_input_nodes if not isinstance(self.kind_of.get(arg), list)}
        partials = {kind for kind in kinds if isinstance(kind, PartialValue)}
        if len(partials) != 1 or any(isinstance(kind, ShardedValue) for kind in kinds):
            return None
        (kind,) = partials
        if name in _STRUCTURAL:
            self._split_wholes(node, kind)
            return [kind] * len(node.meta["val"]) if name == "unbind" else kind
        if None in kinds:
            return None
        arguments = _arguments_by_name(node)
        if name in _NORMS and kind.how == "norm" and arguments.get("dim") is None:
            return kind if float(arguments.get("ord", arguments.get("p")) or 2.0) == kind.order else None
        if name == "pow" and kind.how == "norm" and arguments.get("exponent") == kind.order:
            return PartialValue("sum")
        return kind if kind.how == "sum" and _is_linear(name, arguments) else None

    def _split_wholes(self, node: fx.Node, kind: PartialValue) -> None:
        """Split operands that every rank has whole into equal partial results, to match those of the other operands."""
        for arg in node.all_input_nodes:
            if self.kind_of.get(arg) is None and kind.how in ("sum", "norm"):
                share = self.layouts[0].world ** (-1.0 / (kind.order if kind.how == "norm" else 1.0))
                with self.graph.inserting_before(node):
                    part = self._like(arg, aten.mul.Tensor, arg, share)
                node.replace_input_with(arg, part)

    def _resolve_inputs(self, node: fx.Node) -> None:
        for arg in node.all_input_nodes:
            kind = self.kind_of.get(arg)
            if isinstance(kind, PartialValue):
                node.replace_input_with(arg, self._combined(arg, kind))

    def _combined(self, node: fx.Node, kind: PartialValue) -> fx.Node:
        if node not in self.combined:
            with self.graph.inserting_after(node):
                anchor = self._call(aten.alias.default, node)
            with self.graph.inserting_before(anchor):
                self.combined[node] = self._combine(node, kind)
            self.graph.erase_node(anchor)
        return self.combined[node]

    def _combine(self, node: fx.Node, kind: PartialValue) -> fx.Node:
        dtype = node.meta["val"].dtype
        wide = {torch.bool: torch.int32, torch.half: torch.float32, torch.bfloat16: torch.float32}.get(dtype)
        value = node if wide is None else self._call(aten._to_copy.default, node, dtype=wide)
        if kind.how == "norm" and kind.order != 1:
            value = self._call(aten.pow.Tensor_Scalar, value, kind.order)
        how = "sum" if kind.how == "norm" else kind.how
        value = self._call(c10d.wait_tensor.default, self._call(c10d.all_reduce.default, value, how, self.group))
        if kind.how == "norm" and kind.order != 1:
            value = self._call(aten.pow.Tensor_Scalar, value, 1.0 / kind.order)
        return value if wide is None else self._call(aten._to_copy.default, value, dtype=dtype)

    # -- new nodes

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        first = args[0][0] if isinstance(args[0], list) else args[0]
        return self._like(first, target, *args, **kwargs)

    def _like(self, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, like, target, *args, **kwargs)

    def _refuse(self, node: fx.Node) -> NoReturn:
        names = [
            str(self._shard_name(arg))
            for arg in node.all_input_nodes
            if isinstance(self.kind_of.get(arg), ShardedValue)
        ]
        raise SPMDError(
            f"{node.target} works across the rows of a sharded tensor ({'; '.join(names)}). Each rank has only some "
            "rows, and there is no rule for this operation on shards.",
            remedy='Use DataParallel("replicate"), or compute from the whole parameter: read it as an attribute of its '
            "module (module.weight), not from parameters() or the optimizer.",
            where=node.meta.get("where"),
        )

    def _shard_name(self, arg: fx.Node) -> str:
        return f"{arg.name}: {tuple(arg.meta['val'].shape)} of {self.kind_of[arg].shape}"


def _norm(order: float) -> PartialValue:
    if math.isinf(order):
        return PartialValue("max" if order > 0 else "min")
    return PartialValue("sum") if order == 0 else PartialValue("norm", order)


def _arguments_by_name(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operation, by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is_linear(name: str, arguments: dict[str, Any]) -> bool:
    other = arguments.get("other")
    if name == "add":
        return (
            other == 0
            if isinstance(other, (int, float))
            else isinstance(other, fx.Node) and arguments.get("alpha", 1) == 1
        )
    return name in ("mul", "div") and isinstance(other, (int, float)) and arguments.get("rounding_mode") is None
