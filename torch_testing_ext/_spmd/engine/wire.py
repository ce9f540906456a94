"""The collectives of the engine, on flat tensors."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._torch.spmd import gather_into

from .bucket_plan import plan_buckets

_CHUNK_BYTES = 64 * 2**20


class Wire:
    """The ranks that train together, and how this rank reaches them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world = group.size()
        self.rank = dist.get_rank(group)

    def is_open(self) -> bool:
        """Does the group still exist?"""
        return dist.is_initialized() and dist.group.WORLD is self.group

    def add(self, flat: torch.Tensor) -> Any:
        """Start to sum a flat tensor over ranks, in place. Returns the work to wait for."""
        return dist.all_reduce(real(flat), group=self.group, async_op=True)

    def start_gather(self, into: torch.Tensor, mine: torch.Tensor) -> Any:
        """Start to fill `into` with the tensors of all ranks, one after the other."""
        return gather_into(real(into), real(mine), self.group)

    def gather_numbers(self, numbers: torch.Tensor) -> Callable[[], list[list[int]]]:
        """Start to gather a row of integers from each rank. Returns a function that waits for all rows."""
        into = numbers.new_empty((self.world, *numbers.shape))
        work = self.start_gather(into.view(-1), numbers)

        def rows() -> list[list[int]]:
            work.wait()
            numbers_of_ranks: list[list[int]] = into.tolist()
            return numbers_of_ranks

        return rows

    def gather_objects(self, mine: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered

    def broadcast(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Overwrite `tensors`, of any dtypes, with those of rank 0, by way of `device`."""
        dense = [tensor.detach() for tensor in tensors if tensor.numel() and tensor.layout is torch.strided]
        # The widest dtype first: this aligns every tensor, so that the bytes can be viewed as its dtype.
        dense.sort(key=lambda tensor: -tensor.element_size())
        sizes = [tensor.nbytes for tensor in dense]
        for numbers in plan_buckets(sizes, [None] * len(sizes), _CHUNK_BYTES):
            self._broadcast_chunk([dense[i] for i in numbers], device)

    def _broadcast_chunk(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Send one flat tensor of bytes."""
        pieces = []
        for tensor in tensors:
            in_bytes = tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)
            pieces.append(in_bytes.to(device))
        flat = torch.cat(pieces)
        dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group)
        if self.rank == 0:
            return
        sizes = [tensor.nbytes for tensor in tensors]
        for tensor, piece in zip(tensors, flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def real(flat: torch.Tensor) -> torch.Tensor:
    """A view of a complex tensor as real numbers; another tensor itself."""
    return torch.view_as_real(flat) if flat.is_complex() else flat
