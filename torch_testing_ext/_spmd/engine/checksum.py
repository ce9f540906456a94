"""A checksum of parameters, which ranks compare: of all elements of small ones, and of a sample of large ones.

The sample moves from call to call. The sum is one of bit patterns, so that it is exact, and NaN equals NaN.
"""

from collections.abc import Sequence

import torch

from torch_testing_ext._process.words import grouped

# A parameter of at most so many elements is summed whole.
_WHOLE = 1024
_SAMPLE = 256
# Views of so many samples are kept.
_TURNS = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksum:
    """Sums samples of the same tensors again and again, and keeps the views."""

    def __init__(self) -> None:
        self._places: tuple[tuple[int, torch.Size], ...] = ()
        # By turn: the views of one dtype and device together.
        self._views: dict[int, list[list[torch.Tensor]]] = {}

    def of(self, tensors: Sequence[torch.Tensor], turn: int) -> torch.Tensor | None:
        """A tensor with the sum; None if there is nothing to sum."""
        places = tuple([(tensor.data_ptr(), tensor.shape) for tensor in tensors])
        if places != self._places:
            self._places = places
            self._views = {}
        turn %= _TURNS
        if turn not in self._views:
            views = [sample(tensor, turn) for tensor in tensors if tensor.numel()]
            by_kind = grouped(((view.dtype, view.device), view) for view in views)
            self._views[turn] = list(by_kind.values())
        sums = [torch.cat(alike).sum(dtype=torch.int64) for alike in self._views[turn]]
        if not sums:
            return None
        return sum(sums[1:], start=sums[0])


def sample(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """A view of some elements of a tensor, as integers."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    if not tensor.is_contiguous():
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in strides)
        # Of a tensor with gaps or overlaps, one element: the memory is not all its own.
        count = reach if reach == tensor.numel() else 1
        tensor = tensor.as_strided((count,), (1,))
    flat = tensor.view(-1)
    if flat.numel() > _WHOLE:
        gap = flat.numel() // _SAMPLE
        flat = flat[turn * gap // _TURNS :: gap]
    return flat.view(_INTEGERS[flat.element_size()])


def sum_of(tensors: Sequence[torch.Tensor], turn: int = 0) -> torch.Tensor | None:
    """The checksum of tensors that will not be summed again."""
    return Checksum().of([tensor for tensor in tensors if tensor.layout is torch.strided], turn)
