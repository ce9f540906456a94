"""The layout of a parameter over ranks: whole on each rank, or sharded along dim 0 as by DTensor's Shard(0)."""

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Layout:
    """The layout of one parameter, from the point of view of one rank."""

    shape: torch.Size
    sharded: bool
    rank: int
    world: int

    @property
    def placement(self) -> Placement:
        return Shard(0) if self.sharded else Replicate()

    @property
    def chunk(self) -> int:
        """The number of rows of a full shard. The last ranks may have fewer rows, or none."""
        return -(-self.shape[0] // self.world)

    @property
    def even(self) -> bool:
        """Do all shards have the same number of rows?"""
        return self.shape[0] % self.world == 0

    @property
    def rows(self) -> tuple[int, int]:
        """This rank's rows: the first, and the one after the last."""
        return self.rows_of(self.rank)

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The rows of a rank: the first, and the one after the last."""
        chunk = self.chunk
        start = min(rank * chunk, self.shape[0])
        return start, min(start + chunk, self.shape[0])

    @property
    def local_shape(self) -> torch.Size:
        if not self.sharded:
            return self.shape
        start, end = self.rows
        return torch.Size((end - start, *self.shape[1:]))

    @property
    def padded_numel(self) -> int:
        """The number of elements per rank in a collective, which needs parts of equal size."""
        return self.chunk * math.prod(self.shape[1:])

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor: the tensor itself if replicated, else a copy of its rows."""
        if not self.sharded:
            return whole
        start, end = self.rows
        return whole[start:end].clone(memory_format=torch.contiguous_format)
