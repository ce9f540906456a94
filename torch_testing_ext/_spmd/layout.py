"""The rows of a sharded parameter: along dim 0, as DTensor's Shard(0) places them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_testing_ext._torch.training import gather_into


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

    def unpack(self, parts: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy the parts of all ranks into a whole tensor."""
        whole.copy_(parts.reshape(-1)[: whole.numel()].view(whole.shape))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, without a graph: a view as real numbers of a complex tensor, else the tensor itself."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


class Gather(NamedTuple):
    """The rows of this rank, and the whole tensor to fill with those of all ranks."""

    rows: Rows
    mine: torch.Tensor
    whole: torch.Tensor


# From this size on, rows travel alone, and without a copy.
_DIRECT_BYTES = 256 * 1024


@torch.no_grad()
def gather_rows(group: Any, gathers: Iterable[Gather]) -> None:
    """Fill whole tensors with the rows of all ranks."""
    together: dict[Any, list[Gather]] = {}
    works = []
    for gather in gathers:
        rows, mine, whole = gather.rows, as_real(gather.mine), as_real(gather.whole)
        if rows.world == 1:
            whole.copy_(mine)
        elif rows.is_even and whole.is_contiguous() and whole.nbytes >= _DIRECT_BYTES:
            works.append(gather_into(whole.view(-1), mine.contiguous().view(-1), group))
        else:
            together.setdefault((whole.dtype, whole.device), []).append(Gather(rows, mine, whole))
    for alike in together.values():
        _gather_together(group, alike)
    for work in works:
        work.wait()


def _gather_together(group: Any, gathers: list[Gather]) -> None:
    """Gather tensors of one dtype and device in one collective."""
    widths = [gather.rows.width(gather.whole) for gather in gathers]
    mine = gathers[0].whole.new_zeros(sum(widths))
    for gather, part in zip(gathers, mine.split(widths), strict=True):  # type: ignore[no-untyped-call]
        part[: gather.mine.numel()].view(gather.mine.shape).copy_(gather.mine)
    parts = mine.new_empty(gathers[0].rows.world, len(mine))
    gather_into(parts.view(-1), mine, group).wait()
    for gather, columns in zip(gathers, parts.split(widths, 1), strict=True):  # type: ignore[no-untyped-call]
        gather.rows.unpack(columns, gather.whole)
