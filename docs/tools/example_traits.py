"""Names what is special about an example: operations, sizes, meshes, placements and options."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from example_source import source_of
from torch.distributed.tensor import Shard

from torch_testing_ext._hypothesis.strategies.world_strategies import PartitionPlan
from torch_testing_ext.hypothesis_utils import DTensorPlan, MeshPlan, PerRank

sys.path.append(str(Path(__file__).resolve().parents[2] / "test" / "distributed" / "properties"))

from collective_programs import Program, Step


def traits(value: Any, name: str = "") -> Iterator[str]:
    """Name what is special about a value."""
    match value:
        case bool():
            yield name if value else f"not {name}"
        case int():
            yield f"{name} {value}" if abs(value) < 20 else f"{name} below 0" if value < 0 else f"large {name}"
        case None | str() | torch.dtype():
            yield f"{name} {value!r}".replace("torch.", "")
        case torch.Tensor():
            yield from of_shape(tuple(value.shape))
            yield str(value.dtype).removeprefix("torch.")
        case MeshPlan():
            yield f"mesh of {' x '.join(map(str, value.shape))}"
        case DTensorPlan():
            yield from traits(value.full)
            yield from traits(value.mesh)
            yield from of_layout(tuple(value.full.shape), value.mesh.shape, value.placements)
        case PartitionPlan():
            yield f"groups of {' and '.join(map(str, sorted(map(len, value.blocks))))}"
            if any(block[0] != min(block) or block != tuple(range(block[0], block[-1] + 1)) for block in value.blocks):
                yield "a group with a gap"
        case Program():
            yield f"{min(len(value.steps), 3)} steps"
            for step in value.steps:
                yield from of_step(step)
        case PerRank():
            yield "equal in all ranks" if len(set(map(repr, value.values))) == 1 else "different in ranks"
        case dict():
            for key, item in value.items():
                yield from traits(item, str(key))
        case list() | tuple():
            if all(isinstance(item, int) for item in value):
                yield f"{name} {value}"
                return
            yield f"{len(value)} {name}"
            for item in value:
                yield from traits(item, name.removesuffix("s"))
        case _ if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                yield from traits(getattr(value, field.name), field.name)
        case _:
            yield f"{name} {value!r}"


def of_shape(shape: tuple[int, ...]) -> Iterator[str]:
    yield f"{len(shape)}-D"
    if 0 in shape:
        yield "without elements"
    if 1 in shape:
        yield "a dim of size 1"


def chunks(sizes: list[int], count: int) -> list[int]:
    found = []
    for size in sizes:
        each = -(-size // count)
        found += [max(0, min(each, size - each * rank)) for rank in range(count)]
    return found


def of_layout(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Any, ...], of: str = ""
) -> Iterator[str]:
    """Name how a tensor lies on the ranks. Without elements, it lies nowhere."""
    if 0 in shape:
        return
    end = f" {of}" if of else ""
    dims = [placement.dim for placement in placements if hasattr(placement, "dim")]
    for placement in placements:
        if not hasattr(placement, "dim"):
            yield ("partial" if placement.is_partial() else "replicated") + end
        elif not placement.is_shard() or type(placement) is not Shard:
            yield f"a strided shard{end}"
    for dim in set(dims):
        yield f"sharded dim {dim}{end}"
        parts = [shape[dim]]
        for count, placement in zip(mesh, placements, strict=True):
            if getattr(placement, "dim", None) == dim:
                parts = chunks(parts, count)
        if 0 in parts and shape[dim]:
            yield f"a rank without rows{end}"
        elif len(set(parts)) > 1:
            yield f"uneven shards{end}"
        if dims.count(dim) > 1:
            yield f"a dim that {dims.count(dim)} mesh dims shard{end}"


def of_step(step: Step) -> Iterator[str]:
    yield step.op
    if step.is_async:
        yield f"asynchronous {step.op}"
    if step.op in ("all_reduce", "reduce", "reduce_scatter"):
        yield f"{step.op} by {step.reduce}"
    if step.op in ("broadcast", "gather", "scatter", "reduce"):
        yield f"{step.op} with root {step.root}"
    if step.op != "barrier":
        yield str(step.dtype).removeprefix("torch.")
        if step.size == 0 and not step.sizes:
            yield f"{step.op} without elements"
        elif step.size > 1:
            yield f"{step.op} of several elements"
    if step.sizes:
        yield "uneven all_to_all"
        if any(not any(row) for row in step.sizes):
            yield "a rank that sends nothing"
        if any(not any(column) for column in zip(*step.sizes, strict=True)):
            yield "a rank that receives nothing"


def transitions(
    shape: tuple[int, ...], mesh: MeshPlan, source: tuple[Any, ...], target: tuple[Any, ...]
) -> Iterator[str]:
    """Name what becomes what, where that moves several elements."""
    moved = [shape[one.dim] for one in (*source, *target) if hasattr(one, "dim")]
    if min(moved, default=max(shape)) > 1 and 0 not in shape:
        for size, one, other in zip(mesh.shape, source, target, strict=True):
            if size > 1:
                yield f"{source_of(one)} to {source_of(other)}"
