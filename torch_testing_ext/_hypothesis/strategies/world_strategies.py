"""Strategies over the world of ranks: a value for each rank, device meshes, partitions into process groups."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_testing_ext._hypothesis.blueprints import Blueprint, PerRank
from torch_testing_ext._hypothesis.groups_of_examples import cached_for_group
from torch_testing_ext._hypothesis.property_roles import Participant
from torch_testing_ext._process.words import grouped

from .tensor_strategies import Shape

T = TypeVar("T")
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
