"""Buffers of work in flight: where they lie in memory, and what shows that one has been written."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch

Span: TypeAlias = tuple[int, int]  # the addresses from the first to behind the last byte
_MOST_PIECES = 64  # of a tensor with gaps; one of more is not compared with others
_SAMPLES, _SAMPLE = 64, 512  # pieces of an input and their bytes, by which a write is seen that torch does not count


@dataclass
class Buffer:
    """A tensor in use, as it was when the operation was issued."""

    tensor: torch.Tensor
    version: int | None  # None if writes to other tensors of the same storage count as well
    address: int
    digest: int | None = None  # of samples of a tensor that nobody may write
    site: int = 0  # the line that has taken it as `.data`

    @classmethod
    def of(cls, tensor: torch.Tensor, counts: bool, is_input: bool = False, known: int | None = None) -> Buffer:
        """`counts`: torch's counter of writes does not count what the operation does. `known`: see `_version`."""
        version = _version(tensor, known) if counts else None
        return cls(tensor, version, _address(tensor), _digest(tensor) if is_input else None)

    @classmethod
    def alias(cls, tensor: torch.Tensor, site: int) -> Buffer:
        """A tensor that counts its own writes to the memory of a buffer."""
        return cls(tensor, tensor._version, _address(tensor), site=site)

    def what_happened(self) -> str:
        """Describe what has been done to it since: "" if nothing is known."""
        if self.address != _address(self.tensor):
            return "resized or freed"
        if self.version is not None and self.tensor._version != self.version:
            return "written through .data" if self.site else "written"
        return "written" if self.digest is not None and self.digest != _digest(self.tensor) else ""


def pieces_of(tensors: Iterable[torch.Tensor]) -> list[Span]:
    """The memory of tensors. A tensor with gaps has several pieces; of one with many, none is known."""
    return [piece for tensor in tensors for piece in _pieces(tensor)]


def _pieces(tensor: torch.Tensor) -> list[Span]:
    if not has_memory(tensor) or not tensor.numel():
        return []
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if extent <= tensor.numel():
        start = _address(tensor)
        return [(start, start + extent * tensor.element_size())] if start else []
    if tensor.shape[0] > _MOST_PIECES:
        return []
    found = pieces_of(tensor.detach().unbind(0))
    return found if len(found) <= _MOST_PIECES else []


def overlap(some: Sequence[Span], others: Sequence[Span]) -> bool:
    return any(one[0] < other[1] and other[0] < one[1] for one in some for other in others)


def overlap_each_other(tensors: Sequence[torch.Tensor]) -> bool:
    """Do some of these tensors share memory?"""
    spans = sorted(pieces_of(tensors))
    return any(later[0] < earlier[1] for earlier, later in pairwise(spans))


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if has_memory(tensor) else 0


def has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _version(tensor: torch.Tensor, known: int | None = None) -> int | None:
    """The version, which counts writes to all of a storage; None if the tensor is only a part of that.

    `known`: how many bytes of the storage are in use together with this tensor; unless given, its own.
    """
    if not has_memory(tensor) or tensor.is_inference():
        return None
    used = tensor.nbytes if known is None else known
    return tensor._version if tensor.untyped_storage().nbytes() == used else None


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr() if has_memory(tensor) else 0
    except RuntimeError:  # a tensor without memory of its own: that of a trace, or a subclass
        return 0


def _digest(tensor: torch.Tensor) -> int | None:
    """A digest of all bytes of a small tensor, and of samples of another one; None if they cannot be read here."""
    if tensor.device.type != "cpu" or not has_memory(tensor) or not tensor.numel() or not tensor.is_contiguous():
        return None
    return _checksum(tensor, _SAMPLES * _SAMPLE)


def digest_of_all(tensor: torch.Tensor) -> int | None:
    """A digest of all bytes, on any device; None if they cannot be read here."""
    if not has_memory(tensor) or not tensor.numel() or not _address(tensor):
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # reading it would end the capture of a CUDA graph
    return _checksum(tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.detach().cpu().contiguous())


def _checksum(tensor: torch.Tensor, most: int | None = None) -> int | None:
    address, size = _address(tensor), tensor.nbytes
    if not address:
        return None
    if most is None or size <= most:
        return zlib.crc32((ctypes.c_char * size).from_address(address))
    digest, piece = 0, ctypes.c_char * _SAMPLE
    for number in range(_SAMPLES):
        digest = zlib.crc32(piece.from_address(address + number * (size - _SAMPLE) // (_SAMPLES - 1)), digest)
    return digest
