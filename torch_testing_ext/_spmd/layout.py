"""The rows of a sharded parameter: along dim 0, as DTensor's Shard(0) places them."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor that each rank has. The last ranks may have fewer than others, or none."""

    count: int
    rank: int
    world: int

    @property
    def chunk(self) -> int:
        """The number of rows of a rank that has all it can have."""
        return -(-self.count // self.world)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have the same number of rows."""
        return self.count % self.world == 0

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of this rank's rows of a whole tensor."""
        first = min(self.rank * self.chunk, self.count)
        return whole[first : min(first + self.chunk, self.count)]

    def width(self, whole: torch.Tensor) -> int:
        """The number of elements of a rank's rows in a collective, which needs parts of one size."""
        return self.chunk * (whole.numel() // max(self.count, 1))

    def pack(self, whole: torch.Tensor, parts: torch.Tensor) -> None:
        """Put what a whole tensor adds to a mean into a part for each rank: a row of `width` elements for each."""
        flat = whole.reshape(-1)
        missing = parts.numel() - flat.numel()
        # Divided before the sum, which float16 may not hold.
        torch.div((nn.functional.pad(flat, (0, missing)) if missing else flat).view(parts.shape), self.world, out=parts)

    def unpack(self, parts: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy the parts of all ranks into a whole tensor."""
        whole.copy_(parts.reshape(-1)[: whole.numel()].view(whole.shape))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, without a graph: a view as real numbers of a complex tensor, else the tensor itself."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
