"""Strategies for placements that are valid for a tensor on a mesh, and for DTensors with such placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from torch_testing_ext._hypothesis.blueprints import Blueprint
from torch_testing_ext._torch.tensors import dtensor_parts

from .tensor_strategies import shapes, tensors
from .world_strategies import MeshPlan, device_meshes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

    Placements = tuple[Placement, ...]


def placements(
    mesh: Any,
    tensor: torch.Tensor | int,
    *,
    shard: bool = True,
    strided: bool = False,
    partial: tuple[str, ...] = ("sum",),
) -> st.SearchStrategy[Placements]:
    """One placement for each dim of the mesh (a plan or a DeviceMesh). `tensor` is the tensor or its number of dims.

    `partial`: the reductions that partial placements may have; () for none. `strided`: several dims of the mesh may
    shard the same dim of the tensor in any order; any order other than left to right needs strided shards.
    """
    dims = tensor if isinstance(tensor, int) else tensor.dim()
    may_reorder = strided and shard and mesh.ndim > 1
    placement = _placements_of_one_dim(dims if shard else 0, partial)
    of_each_dim = [placement] * mesh.ndim
    chosen = st.tuples(*of_each_dim).filter(_can_be_combined)
    if not may_reorder:
        return chosen
    dims_of_mesh = range(mesh.ndim)
    sizes = [mesh.size(dim) for dim in dims_of_mesh]
    order = st.permutations(dims_of_mesh)
    return st.builds(in_order, chosen, order, st.just(sizes))


def _placements_of_one_dim(dims: int, partial: tuple[str, ...]) -> st.SearchStrategy[Placement]:
    """A placement, on one dim of a mesh, for a tensor with `dims` dims.

    The sharded dim is drawn from the same range for any number of dims, so that shrinking can remove dims of the tensor
    without changing this draw.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    replicate = Replicate()
    partials = [Partial(op) for op in partial]
    if dims == 0:
        return st.sampled_from([replicate, *partials])
    last = dims - 1

    def shard(dim: int) -> Placement:
        return Shard(min(dim, last))

    shards = st.integers(0, max(3, last)).map(shard)
    of_partials = [st.just(placement) for placement in partials]
    return st.one_of(st.just(replicate), shards, *of_partials)


def in_order(
    chosen: Sequence[Placement],
    order: Sequence[int],
    sizes: Sequence[int],
) -> Placements:
    """Return the placements with which mesh dims of these `sizes` shard a tensor in `order`, the outermost first."""

    def earlier_to_the_right(mesh_dim: int) -> int:
        """The number of parts that the mesh dims to the right make of the same dim, as far as they come first."""
        place = order.index(mesh_dim)
        to_the_right = [other for other in order[:place] if other > mesh_dim]
        same = [other for other in to_the_right if chosen[other] == chosen[mesh_dim]]
        return math.prod(sizes[other] for other in same)

    result = []
    for mesh_dim, placement in enumerate(chosen):
        factor = earlier_to_the_right(mesh_dim) if placement.is_shard() else 1
        if factor > 1:
            placement = dtensor_parts.strided_shard(placement.dim, factor)  # type: ignore[attr-defined]  # it is a Shard
        result.append(placement)
    return tuple(result)


def _can_be_combined(chosen: Placements) -> bool:
    """Whether a tensor can have all of these. Partial results of different reductions have no defined order."""
    partials: list[Any] = [placement for placement in chosen if placement.is_partial()]
    reductions = {placement.reduce_op for placement in partials}
    return len(reductions) <= 1


@dataclass(frozen=True)
class DTensorPlan(Blueprint):
    """A plan of a DTensor. The test's body gets the DTensor, whose full tensor is `full`."""

    full: torch.Tensor
    mesh: MeshPlan
    placements: tuple[Any, ...]

    def build(self) -> DTensor:
        return distribute(self.full, self.mesh.build(), self.placements)

    def __repr__(self) -> str:
        shape = list(self.full.shape)
        dtype = str(self.full.dtype).removeprefix("torch.")
        return f"DTensor({dtype}{shape} on {self.mesh!r} as {self.placements})"


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
        is_sum = placement.is_partial() and placement.reduce_op == "sum"
        if is_sum and mesh.get_local_rank(dim) != 0:
            local = torch.zeros_like(local)
    return DTensor.from_local(
        local,
        mesh,
        chosen,
        run_check=False,
        shape=full.shape,
        stride=placed.stride(),
    )


def dtensors(
    mesh: st.SearchStrategy[MeshPlan] | None = None,
    full: st.SearchStrategy[torch.Tensor] | None = None,
    partial: tuple[str, ...] = ("sum",),
    strided: bool = False,
) -> st.SearchStrategy[DTensorPlan]:
    """DTensors with any placements. In strategies they are plans, with `.full`, `.mesh` and `.placements`."""
    if full is None:
        full = tensors(shapes(1), torch.float32, contiguous=True)
    if mesh is None:
        mesh = device_meshes(max_dims=2)

    def place(drawn: tuple[torch.Tensor, MeshPlan]) -> st.SearchStrategy[DTensorPlan]:
        tensor, plan = drawn
        chosen = placements(plan, tensor, partial=partial, strided=strided)
        return st.builds(DTensorPlan, st.just(tensor), st.just(plan), chosen)

    return st.tuples(full, mesh).flatmap(place)
