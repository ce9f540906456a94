"""Strategies for placements that are valid for a tensor on a mesh, and for DTensors with such placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from torch_testing_ext import _torch

from ..example_values import Blueprint
from .meshes import MeshPlan, device_meshes
from .tensors import shapes, tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def placements(
    mesh: Any,
    tensor: torch.Tensor | int,
    *,
    shard: bool = True,
    strided: bool = False,
    partial: tuple[str, ...] = ("sum",),
) -> st.SearchStrategy[tuple[Placement, ...]]:
    """One placement for each dim of the mesh (a plan or a DeviceMesh). `tensor` is the tensor or its number of dims.

    `partial`: the reductions that partial placements may have; () for none. `strided`: several dims of the mesh may
    shard the same dim of the tensor in any order; any order other than left to right needs strided shards.
    """
    dims = tensor if isinstance(tensor, int) else tensor.dim()
    each = _each(dims if shard else 0, partial)
    chosen = st.tuples(*[each] * mesh.ndim).filter(_can_be_combined)
    if not (strided and shard and mesh.ndim > 1):
        return chosen
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    order = st.permutations(range(mesh.ndim))
    return st.builds(lambda some, order: in_order(some, order, sizes), chosen, order)


def _each(dims: int, partial: tuple[str, ...]) -> st.SearchStrategy[Placement]:
    """A placement for a tensor with `dims` dims.

    The sharded dim is drawn from the same range for any number of dims, so that shrinking can remove dims of the tensor
    without changing this draw.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    others = [Replicate(), *(Partial(op) for op in partial)]
    if dims == 0:
        return st.sampled_from(others)
    shards = st.integers(0, max(3, dims - 1)).map(lambda dim: Shard(min(dim, dims - 1)))
    return st.one_of(st.just(others[0]), shards, *(st.just(other) for other in others[1:]))


def in_order(chosen: Sequence[Placement], order: Sequence[int], sizes: Sequence[int]) -> tuple[Placement, ...]:
    """Return the placements with which mesh dims of these `sizes` shard a tensor in `order`, the outermost first."""

    def earlier_to_the_right(mesh_dim: int) -> int:
        before = order[: order.index(mesh_dim)]
        return math.prod(sizes[i] for i in before if i > mesh_dim and chosen[i] == chosen[mesh_dim])

    return tuple(
        _torch.dtensor.strided_shard(placement.dim, factor)  # type: ignore[attr-defined]  # it is a Shard
        if placement.is_shard() and (factor := earlier_to_the_right(mesh_dim)) > 1
        else placement
        for mesh_dim, placement in enumerate(chosen)
    )


def _can_be_combined(chosen: tuple[Placement, ...]) -> bool:
    """Can a tensor have all of these? Partial results of different reductions have no defined order of reduction."""
    return len({placement.reduce_op for placement in chosen if placement.is_partial()}) <= 1  # type: ignore[attr-defined]


@dataclass(frozen=True)
class DTensorPlan(Blueprint):
    """A plan of a DTensor. The test's body gets the DTensor, whose full tensor is `full`."""

    full: torch.Tensor
    mesh: MeshPlan
    placements: tuple[Any, ...]

    def build(self) -> DTensor:
        return distribute(self.full, self.mesh.build(), self.placements)

    def __repr__(self) -> str:
        shape, dtype = tuple(self.full.shape), str(self.full.dtype).removeprefix("torch.")
        return f"DTensor({dtype}{list(shape)} on {self.mesh!r} as {self.placements})"


def distribute(full: torch.Tensor, mesh: Any, chosen: tuple[Any, ...]) -> DTensor:
    """Return a DTensor with these placements, from a full tensor that every rank has, without communication.

    For a partial sum, the first rank of the mesh dim holds the full values and the others hold zeros. For other
    reductions, every rank holds the full values.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    whole = tuple(Replicate() if placement.is_partial() else placement for placement in chosen)
    placed = distribute_tensor(full, mesh, whole, src_data_rank=None)
    local = placed.to_local().clone()
    for dim, placement in enumerate(chosen):
        if placement.is_partial() and placement.reduce_op == "sum" and mesh.get_local_rank(dim) != 0:
            local = torch.zeros_like(local)
    return DTensor.from_local(local, mesh, chosen, run_check=False, shape=full.shape, stride=placed.stride())


def dtensors(
    mesh: st.SearchStrategy[MeshPlan] | None = None,
    full: st.SearchStrategy[torch.Tensor] | None = None,
    partial: tuple[str, ...] = ("sum",),
    strided: bool = False,
) -> st.SearchStrategy[DTensorPlan]:
    """DTensors with any placements. In strategies they are plans, with `.full`, `.mesh` and `.placements`."""
    full = tensors(shapes(1), torch.float32, contiguous=True) if full is None else full
    mesh = device_meshes(max_dims=2) if mesh is None else mesh

    def place(parts: tuple[torch.Tensor, MeshPlan]) -> st.SearchStrategy[DTensorPlan]:
        chosen = placements(parts[1], parts[0], partial=partial, strided=strided)
        return chosen.map(lambda placements: DTensorPlan(*parts, placements))

    return st.tuples(full, mesh).flatmap(place)
