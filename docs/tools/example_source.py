"""Writes an example as source."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from torch_testing_ext._hypothesis.strategies.placement_strategies import in_order
from torch_testing_ext.hypothesis_utils import DTensorPlan, MeshPlan, whole_numbers


def source_of(value: Any) -> str:
    """Return an expression for a value."""
    match value:
        case torch.Tensor():
            return source_of_numbers(value)
        case torch.dtype() | torch.device():
            return repr(value) if isinstance(value, torch.dtype) else f"torch.{value!r}"
        case Replicate():
            return "Replicate()"
        case Partial():
            return "Partial()" if value.reduce_op == "sum" else f"Partial({value.reduce_op!r})"
        case Shard():
            return f"Shard({value.dim})"
        case DTensorPlan():
            return f"DTensorPlan({source_of(value.full)}, {source_of(value.mesh)}, {of_placements(value)})"
        case MeshPlan():
            return f"MeshPlan({value.shape!r})"
        case dict():
            return f"{{{', '.join(f'{key!r}: {source_of(item)}' for key, item in value.items())}}}"
        case list():
            return f"[{', '.join(map(source_of, value))}]"
        case tuple():
            return f"({', '.join(map(source_of, value))}{',' * (len(value) == 1)})"
        case _ if dataclasses.is_dataclass(value):
            return f"{type(value).__name__}({', '.join(arguments_of(value))})"
    return repr(value)


def arguments_of(value: Any) -> Iterator[str]:
    """Return the arguments of a dataclass: fields without a default by position, others by name if they differ."""
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            yield source_of(item)
        elif item != field.default:
            yield f"{field.name}={source_of(item)}"


def source_of_numbers(tensor: torch.Tensor) -> str:
    shape = tuple(tensor.shape)
    start = next(n for n in range(8) if torch.equal(whole_numbers(shape, tensor.dtype, n), tensor))
    assert tensor.is_contiguous()
    dtype = [] if tensor.dtype is torch.float32 and not start else [repr(tensor.dtype)]
    return f"whole_numbers({', '.join([repr(shape), *dtype, *[repr(start)] * bool(start)])})"


def of_placements(plan: Any) -> str:
    """Return the source of placements; strided shards are shards in another order of the mesh dims."""
    placements, sizes = plan.placements, plan.mesh.shape
    if all(type(one) in (Shard, Replicate, Partial) for one in placements):
        return source_of(tuple(placements))
    plain = tuple(Shard(one.dim) if hasattr(one, "dim") else one for one in placements)
    order = next(o for o in itertools.permutations(range(len(sizes))) if in_order(plain, o, sizes) == placements)
    return f"in_order({source_of(plain)}, {order}, {sizes})"
