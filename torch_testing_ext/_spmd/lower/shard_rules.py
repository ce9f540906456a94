"""Rules for operations: those that work on shards row by row, and how others combine partial results over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..param_layout import Layout
from .graphs import is_operation

aten = torch.ops.aten


@dataclass(frozen=True)
class PartialValue:
    """A rank's partial result, to be combined over ranks by "sum", "max" or "min", or as a "norm" of order `order`."""

    how: str
    order: float = 0.0


ELEMENTWISE = {
    "copy_", "copy", "clone", "_to_copy", "zero_", "fill_", "where", "masked_fill", "masked_fill_", "lerp", "lerp_",
    "addcmul", "addcmul_", "addcdiv", "addcdiv_", "isnan", "isinf", "isfinite", "clamp", "clamp_", "sgn", "sign",
    "nan_to_num", "copysign",
}  # fmt: skip
# New tensors in the shape of an argument, whose values they do not read.
LIKE = {"empty_like", "zeros_like", "ones_like", "full_like"}
# New tensors of another shape: an argument only gives the dtype and the device.
NEW = {"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"}
STRUCTURAL = {"stack", "cat", "view", "reshape", "unsqueeze", "squeeze", "_to_copy", "clone", "select", "unbind",
              "expand"}  # fmt: skip
REDUCTIONS = {
    "sum": "sum", "mean": "sum", "count_nonzero": "sum", "dot": "sum", "vdot": "sum", "max": "max", "amax": "max",
    "min": "min", "amin": "min", "any": "max", "all": "min",
}  # fmt: skip
NORMS = {"linalg_vector_norm", "norm"}
FOREACH_REDUCTIONS = {"_foreach_norm", "_foreach_max"}
WIDE = {torch.bool: torch.int32, torch.half: torch.float32, torch.bfloat16: torch.float32}
WITHOUT_DIM: dict[Any, Any] = {
    aten._foreach_max.default: aten.max.default,
    aten._foreach_norm.Scalar: aten.linalg_vector_norm.default,
}


def op_name(node: fx.Node) -> str:
    """The name of an operation without namespace and overload; empty if the node calls something else."""
    return node.target._schema.name.removeprefix("aten::") if is_operation(node) else ""  # type: ignore[union-attr]


def is_elementwise(node: fx.Node) -> bool:
    name = op_name(node)
    if not name or torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return False
    return torch.Tag.pointwise in node.target.tags or name in ELEMENTWISE or name in LIKE  # type: ignore[union-attr]


def is_by_lists(node: fx.Node) -> bool:
    """Whether the i-th tensors of all lists that the operation takes belong together."""
    return op_name(node).startswith(("_foreach_", "_fused_")) and op_name(node) not in FOREACH_REDUCTIONS


def arguments_by_name(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operation, by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def norm_order(node: fx.Node) -> float:
    arguments = arguments_by_name(node)
    order = arguments.get("ord", arguments.get("p"))
    return 2.0 if order is None else float(order)


def reduction_kind(node: fx.Node, ndim: int) -> PartialValue | None:
    """The way to combine the results of a reduction over ranks, or None if it keeps some dimension."""
    name, arguments = op_name(node), arguments_by_name(node)
    dims = arguments.get("dim")
    if dims is not None and dims != []:
        dims = [dims] if isinstance(dims, int) else list(dims)
        if {d % ndim for d in dims} != set(range(ndim)):
            return None
    if name in NORMS or name == "_foreach_norm":
        order = norm_order(node)
        if math.isinf(order):
            return PartialValue("max" if order > 0 else "min")
        return PartialValue("sum") if order == 0 else PartialValue("norm", order)
    return PartialValue("max") if name == "_foreach_max" else PartialValue(REDUCTIONS[name])


def neutral_value(kind: PartialValue, is_norm: bool, dtype: torch.dtype) -> float | int | bool:
    """The contribution of a rank without rows to a maximum or minimum."""
    if dtype == torch.bool:
        return kind.how == "min"
    if is_norm:
        return 0.0 if kind.how == "max" else math.inf
    if dtype.is_floating_point:
        return -math.inf if kind.how == "max" else math.inf
    return torch.iinfo(dtype).min if kind.how == "max" else torch.iinfo(dtype).max


def partial_kind(node: fx.Node, kind: PartialValue, all_partial: bool) -> PartialValue | None:
    """The kind of an operation on partial results of `kind`; None if they must be combined first."""
    name, arguments = op_name(node), arguments_by_name(node)
    if not all_partial:
        return None
    if name in NORMS and kind.how == "norm" and arguments.get("dim") is None:
        return kind if norm_order(node) == kind.order else None
    if name == "pow" and kind.how == "norm" and arguments.get("exponent") == kind.order:
        return PartialValue("sum")
    return kind if kind.how == "sum" and _is_linear(name, arguments) else None


def _is_linear(name: str, arguments: dict[str, Any]) -> bool:
    other = arguments.get("other")
    if name == "add":
        if isinstance(other, (int, float)):
            return other == 0
        return isinstance(other, fx.Node) and arguments.get("alpha", 1) == 1
    return name in ("mul", "div") and isinstance(other, (int, float)) and arguments.get("rounding_mode") is None


def rows_conform(whole: torch.Size, result: torch.Size) -> bool:
    """Whether an elementwise operation on shards of shape `whole` yields the shards of its result."""
    return len(whole) == len(result) and whole[0] == result[0]


def same_rows(a: Layout, b: Layout) -> bool:
    return len(a.shape) == len(b.shape) and a.shape[0] == b.shape[0]
