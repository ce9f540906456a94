"""The strategies: tensors, meshes, placements, partitions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_testing_ext._process.words import grouped
from torch_testing_ext._torch import sharding

from .examples import Blueprint, PerRank
from .links import cached_for_group
from .property_run import Participant

# --------------------------------------------------------------------------------------------------------------------
# Strategies over the world of ranks: a value for each rank, device meshes, partitions into process groups.

T = TypeVar("T")
Shape = tuple[int, ...]
# The ranks of each group.
Blocks = tuple[tuple[int, ...], ...]
NAMES = ("x", "y", "z")


def world_size() -> int:
    """Return the number of ranks that run the current property."""
    if Participant.current is None:
        raise ValueError("this strategy works only in tests that run in ranks: there is no world of ranks to draw from")
    return Participant.current.world_size


def over_world(make: Callable[[int], st.SearchStrategy[T]]) -> st.SearchStrategy[T]:
    """A strategy made from the world size, as in `over_world(lambda size: integers(0, size - 1))`."""
    return st.builds(world_size).flatmap(make)


def ranks() -> st.SearchStrategy[int]:
    return over_world(lambda size: st.integers(0, size - 1))


def per_rank(strategy: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    """A value for each rank, drawn from `strategy`. The test gets the value of its own rank."""

    def make(size: int) -> st.SearchStrategy[Any]:
        of_each_rank = [strategy] * size
        return st.tuples(*of_each_rank).map(PerRank)

    return over_world(make)


@dataclass(frozen=True)
class MeshPlan(Blueprint):
    """A plan of a device mesh. The test's body gets the DeviceMesh."""

    shape: Shape
    device_type: str = "cpu"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: self.ndim]

    def size(self, dim: int | None = None) -> int:
        if dim is None:
            return math.prod(self.shape)
        return self.shape[dim]

    def build(self) -> DeviceMesh:
        mesh: DeviceMesh = cached_for_group(self, self._create)
        return mesh

    def _create(self) -> DeviceMesh:
        return init_device_mesh(self.device_type, self.shape, mesh_dim_names=self.names)

    def __repr__(self) -> str:
        return f"mesh{self.shape}"


def _shapes_of(size: int, dims: int) -> list[Shape]:
    """Return all shapes with `dims` dims whose product is `size`, those with the fewest dims of size 1 first."""
    if dims == 1:
        return [(size,)]
    shapes: list[Shape] = []
    for first in range(1, size + 1):
        if size % first == 0:
            others = _shapes_of(size // first, dims - 1)
            shapes += [(first, *rest) for rest in others]
    return sorted(shapes, key=lambda shape: shape.count(1))


def device_meshes(min_dims: int = 1, max_dims: int = 3, device_type: str = "cpu") -> st.SearchStrategy[MeshPlan]:
    """Meshes over all ranks, including dims of size 1."""

    def make(size: int) -> st.SearchStrategy[MeshPlan]:
        plans = []
        for dims in range(min_dims, max_dims + 1):
            shapes = _shapes_of(size, dims)
            plans += [MeshPlan(shape, device_type) for shape in shapes]
        return st.sampled_from(plans)

    return over_world(make)


@dataclass(frozen=True)
class Partition:
    """The ranks of the world, divided into disjoint process groups. `mine` is the group of this rank."""

    blocks: Blocks
    mine: Any

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of the members of this rank's group, in the order of their ranks in the group."""
        return self.blocks[_own_block(self.blocks)]


def _own_block(blocks: Blocks) -> int:
    """The number of the block that this rank is in."""
    rank = dist.get_rank()
    (number,) = [number for number, block in enumerate(blocks) if rank in block]
    return number


@dataclass(frozen=True)
class PartitionPlan(Blueprint):
    """A plan of a partition. The test's body gets the Partition."""

    blocks: Blocks

    def build(self) -> Partition:
        partition: Partition = cached_for_group(self, self._create)
        return partition

    def _create(self) -> Partition:
        groups = []
        for block in self.blocks:
            create = functools.partial(dist.new_group, list(block))
            groups.append(cached_for_group(block, create))
        own = groups[_own_block(self.blocks)]
        return Partition(self.blocks, own)

    def __repr__(self) -> str:
        blocks = [" ".join(map(str, block)) for block in self.blocks]
        return " | ".join(blocks)


def partitions() -> st.SearchStrategy[PartitionPlan]:
    """Partitions of the world into any number of groups of any sizes. The simplest is one group of all ranks."""

    def make(size: int) -> st.SearchStrategy[PartitionPlan]:
        highest = [min(rank, 3) for rank in range(size)]
        labels = [st.integers(0, label) for label in highest]
        return st.tuples(*labels).map(_to_blocks)

    return over_world(make)


def _to_blocks(labels: tuple[int, ...]) -> PartitionPlan:
    blocks = grouped((label, rank) for rank, label in enumerate(labels))
    return PartitionPlan(tuple(tuple(block) for block in blocks.values()))


# --------------------------------------------------------------------------------------------------------------------
# Shapes, dtypes and tensors that often break distributed code: empty, prime and uneven sizes, size 1, odd strides.
#
# Values are small whole numbers, all different if the tensor is small enough. Their sums are exact in every dtype
# used here, so results can be compared exactly, and an element in the wrong place is detected.

Shapes = st.SearchStrategy[Shape]
Dtypes = st.SearchStrategy[torch.dtype]

# The simplest first: Hypothesis shrinks towards the front.
SIZES = (1, 2, 3, 0, 4, 5, 6, 7, 8, 11, 13)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bfloat16,
    torch.uint8,
    torch.bool,
)
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
_LAYOUTS = ("contiguous", "transposed", "strided", "offset")
# Every whole number below this is exact in bfloat16, and so are its sums over a few ranks.
_LARGEST = 61


def dtypes(floating: bool = False) -> Dtypes:
    """Dtypes; with `floating`, only floating-point ones."""
    return st.sampled_from(FLOATS if floating else DTYPES)


def shapes(
    min_dims: int = 0,
    max_dims: int = 3,
    sizes: Sequence[int] = SIZES,
    max_numel: int = 512,
) -> Shapes:
    """Shapes, including dims of size 0, size 1 and prime sizes."""
    size = st.sampled_from(list(sizes))
    several = st.lists(size, min_size=min_dims, max_size=max_dims).map(tuple)
    return several.filter(lambda shape: math.prod(shape) <= max_numel)


def tensors(
    shape: Shapes | Sequence[int] | None = None,
    dtype: Dtypes | torch.dtype | None = None,
    contiguous: bool | None = None,
) -> st.SearchStrategy[torch.Tensor]:
    """CPU tensors. `contiguous`: True, False (if the shape allows it) or None for either."""
    if shape is None:
        shape = shapes()
    elif not isinstance(shape, st.SearchStrategy):
        shape = st.just(tuple(shape))
    if dtype is None:
        dtype = dtypes()
    elif not isinstance(dtype, st.SearchStrategy):
        dtype = st.just(dtype)
    layouts = st.sampled_from(_layouts(contiguous))
    starts = st.integers(0, 7)
    return st.builds(_make, shape, dtype, layouts, starts)


def _layouts(contiguous: bool | None) -> Sequence[str]:
    first, *others = _LAYOUTS
    if contiguous is None:
        return _LAYOUTS
    return [first] if contiguous else others


def _make(shape: Shape, dtype: torch.dtype, layout: str, start: int) -> torch.Tensor:
    tensor = whole_numbers(shape, dtype, start)
    return lay_out(tensor, layout)


def whole_numbers(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    start: int = 0,
) -> torch.Tensor:
    """Return start, start + 1, ... in row-major order, modulo a number up to which sums stay exact."""
    numbers = torch.arange(math.prod(shape)) + start
    values = numbers % _LARGEST
    if dtype is torch.bool:
        values = values % 2
    return values.reshape(tuple(shape)).to(dtype)


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor with the same values and other strides."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.dim() > 0:
        with_gaps = torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)
        return with_gaps[..., 0]
    if layout == "offset":
        gap = tensor.new_zeros(1)
        behind_gap = torch.cat([gap, tensor.reshape(-1)])[1:]
        return behind_gap.reshape(tensor.shape)
    return tensor


# --------------------------------------------------------------------------------------------------------------------
# Strategies for placements that are valid for a tensor on a mesh, and for DTensors with such placements.

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
            placement = sharding.strided_shard(placement.dim, factor)  # type: ignore[attr-defined]  # it is a Shard
        result.append(placement)
    return tuple(result)


def _can_be_combined(chosen: Placements) -> bool:
    """Can a tensor have all of these? Partial results of different reductions have no defined order of reduction."""
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
