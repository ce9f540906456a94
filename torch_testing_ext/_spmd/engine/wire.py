"""The collectives of the engine, on flat tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._torch.spmd import gather_into

_CHUNK_BYTES = 64 * 2**20


class Wire:
    """The ranks that train together, and how this rank reaches them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world, self.rank = group.size(), dist.get_rank(group)

    def is_open(self) -> bool:
        """Whether the group still exists."""
        return dist.is_initialized() and dist.group.WORLD is self.group

    def add(self, flat: torch.Tensor) -> Any:
        """Start to sum a flat tensor over ranks, in place. Returns the work to wait for."""
        return dist.all_reduce(real(flat), group=self.group, async_op=True)

    def start_gather(self, into: torch.Tensor, mine: torch.Tensor) -> Any:
        """Start to fill `into` with the tensors of all ranks, one after the other."""
        return gather_into(real(into), real(mine), self.group)

    def gather_numbers(self, numbers: torch.Tensor) -> PendingNumbers:
        """Start to gather a row of integers from each rank."""
        rows = numbers.new_empty((self.world, *numbers.shape))
        return PendingNumbers(rows, self.start_gather(rows.view(-1), numbers))

    def gather_objects(self, mine: Any) -> list[Any]:
        """The objects of all ranks."""
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered

    def broadcast(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Overwrite `tensors`, of any dtypes, with those of rank 0, by way of `device`."""
        dense = [tensor.detach() for tensor in tensors if tensor.numel() and tensor.layout is torch.strided]
        # The widest dtype first: this aligns every tensor, so that the bytes can be viewed as its dtype.
        for chunk in _chunks(sorted(dense, key=lambda tensor: -tensor.element_size())):
            self._broadcast_chunk(chunk, device)

    def _broadcast_chunk(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        flat = torch.cat([_bytes(tensor).to(device) for tensor in tensors])
        dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group)
        if self.rank == 0:
            return
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        for tensor, piece in zip(tensors, flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


class PendingNumbers:
    """Rows of integers that are on their way."""

    def __init__(self, rows: torch.Tensor, work: Any) -> None:
        self._rows, self._work = rows, work

    def rows(self) -> list[list[int]]:
        """Wait for the rows of all ranks."""
        self._work.wait()
        found: list[list[int]] = self._rows.tolist()
        return found


def real(flat: torch.Tensor) -> torch.Tensor:
    """A view of a complex tensor as real numbers; another tensor itself."""
    return torch.view_as_real(flat) if flat.is_complex() else flat


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        chunk.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
