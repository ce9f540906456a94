"""Buffers of work in flight: where they lie in memory, and what shows that one has been written."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch

from torch_testing_ext._torch.training import version_of

# The addresses from the first to behind the last byte.
Span: TypeAlias = tuple[int, int]
# The most pieces of a tensor with gaps; one that has more is not compared with others.
_MOST_PIECES = 64
# The pieces of an input and their bytes, by which a write is seen that torch does not count.
_SAMPLES, _SAMPLE = 64, 512


@dataclass(slots=True)
class Buffer:
    """A tensor in use, as it was when the operation was issued."""

    tensor: torch.Tensor
    # None if writes to other tensors of the same storage count as well.
    version: int | None
    address: int
    # The digest of samples of a tensor that nobody may write.
    digest: int | None = None
    # The line that has taken it as `.data`.
    site: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, counts: bool, is_input: bool = False, known: int | None = None) -> Buffer:
        """`counts`: torch's counter of writes does not count what the operation does.

        `known`: see `_version_of_all`.
        """
        version = _version_of_all(tensor, known) if counts else None
        return cls(tensor, version, _address(tensor), _digest(tensor) if is_input else None)

    @classmethod
    def alias(cls, tensor: torch.Tensor, site: int) -> Buffer:
        """A tensor that counts its own writes to the memory of a buffer."""
        return cls(tensor, version_of(tensor), _address(tensor), site=site)

    def what_happened(self) -> str:
        """Describe what has been done to it since: "" if nothing is known."""
        if self.address != _address(self.tensor):
            return "resized or freed"
        if self.version is not None and version_of(self.tensor) != self.version:
            return "written through .data" if self.site else "written"
        if self.digest is not None and self.digest != _digest(self.tensor):
            return "written"
        return ""


def pieces_of(tensors: Iterable[torch.Tensor]) -> list[Span]:
    """The memory of tensors. A tensor with gaps has several pieces; of one with many, none is known."""
    return [piece for tensor in tensors for piece in _pieces(tensor)]


def _pieces(tensor: torch.Tensor) -> list[Span]:
    if not has_memory(tensor) or not tensor.numel():
        return []
    if tensor.is_contiguous():
        start = _address(tensor)
        return [(start, start + tensor.nbytes)] if start else []
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in strides)
    if extent <= tensor.numel():
        start = _address(tensor)
        return [(start, start + extent * tensor.element_size())] if start else []
    if tensor.shape[0] > _MOST_PIECES:
        return []
    pieces = pieces_of(tensor.detach().unbind(0))
    return pieces if len(pieces) <= _MOST_PIECES else []


def do_overlap(some: Sequence[Span], others: Sequence[Span]) -> bool:
    for start, end in some:
        for other_start, other_end in others:
            if start < other_end and other_start < end:
                return True
    return False


def overlap_each_other(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some of these tensors share memory."""
    spans = sorted(pieces_of(tensors))
    return any(later[0] < earlier[1] for earlier, later in pairwise(spans))


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if has_memory(tensor) else 0


def has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _version_of_all(tensor: torch.Tensor, known: int | None = None) -> int | None:
    """The version, which counts writes to all of a storage; None if the tensor is only a part of that.

    `known`: how many bytes of the storage are in use together with this tensor; unless given, its own.
    """
    if not has_memory(tensor) or tensor.is_inference():
        return None
    used = tensor.nbytes if known is None else known
    return version_of(tensor) if tensor.untyped_storage().nbytes() == used else None


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr() if has_memory(tensor) else 0
    except RuntimeError:  # a tensor without memory of its own: that of a trace, or a subclass
        return 0


def _digest(tensor: torch.Tensor) -> int | None:
    """A digest of all bytes of a small tensor, and of samples of another one; None if they cannot be read here."""
    if tensor.device.type != "cpu" or not has_memory(tensor):
        return None
    if not tensor.numel() or not tensor.is_contiguous():
        return None
    return _checksum(tensor, _SAMPLES * _SAMPLE)


def digest_of_all(tensor: torch.Tensor) -> int | None:
    """A digest of all bytes, on any device; None if they cannot be read here."""
    if not has_memory(tensor) or not tensor.numel() or not _address(tensor):
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        # Reading it would end the capture of a CUDA graph.
        return None
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = tensor.detach().cpu().contiguous()
    return _checksum(tensor)


def _checksum(tensor: torch.Tensor, most: int | None = None) -> int | None:
    """A digest of a contiguous tensor in the memory of this process; of one with more bytes, of samples."""
    address = _address(tensor)
    size = tensor.nbytes
    if not address:
        return None
    if most is None or size <= most:
        return zlib.crc32((ctypes.c_char * size).from_address(address))
    digest = 0
    sample = ctypes.c_char * _SAMPLE
    for number in range(_SAMPLES):
        offset = number * (size - _SAMPLE) // (_SAMPLES - 1)
        digest = zlib.crc32(sample.from_address(address + offset), digest)
    return digest
