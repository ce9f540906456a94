"""How a parameter lies on the ranks: whole on each, or cut along dim 0 as DTensor's Shard(0) cuts it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Layout:
    shape: torch.Size
    sharded: bool
    rank: int
    world: int

    @property
    def placement(self) -> Placement:
        return Shard(0) if self.sharded else Replicate()

    @property
    def chunk(self) -> int:
        """Rows of the largest shard: every rank's but the last ones', which may have fewer or none."""
        return -(-self.shape[0] // self.world)

    @property
    def even(self) -> bool:
        return self.shape[0] % self.world == 0

    @property
    def rows(self) -> tuple[int, int]:
        start = min(self.rank * self.chunk, self.shape[0])
        return start, min(start + self.chunk, self.shape[0])

    @property
    def local_shape(self) -> torch.Size:
        if not self.sharded:
            return self.shape
        start, end = self.rows
        return torch.Size((end - start, *self.shape[1:]))

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def padded_numel(self) -> int:
        """Elements of one rank's part in a collective, where all parts are of one size."""
        return self.chunk * self.row_numel

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor: the tensor itself, or a copy of its rows."""
        if not self.sharded:
            return whole
        start, end = self.rows
        return whole[start:end].clone(memory_format=torch.contiguous_format)
