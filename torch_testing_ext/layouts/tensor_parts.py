"""The part of a whole tensor that a rank holds, and where it is found by its content."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._torch.tensors.dtensor_parts import indices_of_local

# For each dimension the indices that are held, None for all; -1 is padding.
Index = tuple[torch.Tensor | None, ...]


@dataclass
class Part:
    """The rows, columns and so on of a whole tensor that a rank holds.

    `partial`: groups of ranks over which the value is the sum.
    """

    index: Index
    partial: tuple[tuple[int, ...], ...] = ()

    @property
    def is_whole(self) -> bool:
        return all(rows is None for rows in self.index)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole tensor, with zeros where it is padded."""
        for dim, rows in enumerate(self.index):
            if rows is not None:
                whole = whole.index_select(dim, rows.clamp(min=0))
        return self.without_padding(whole)

    def without_padding(self, local: torch.Tensor) -> torch.Tensor:
        """A local tensor with zeros where it is padding."""
        for dim, rows in enumerate(self.index):
            if rows is not None and bool((rows < 0).any()):
                shape = [1] * local.dim()
                shape[dim] = -1
                local = local * (rows >= 0).to(local.dtype).view(shape)
        return local

    def put(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Write a local tensor to its place in a whole one."""
        if self.is_whole:
            whole.copy_(local)
            return
        kept = local
        held = [
            torch.arange(size) if rows is None else rows for rows, size in zip(self.index, whole.shape, strict=True)
        ]
        for dim, rows in enumerate(held):
            kept = kept.index_select(dim, (rows >= 0).nonzero()[:, 0])
        whole[torch.meshgrid(*[rows[rows >= 0] for rows in held], indexing="ij")] = kept.to(whole.dtype)

    def key(self) -> tuple[tuple[int, ...] | None, ...]:
        """The part as a value that can be compared."""
        return tuple(None if rows is None else tuple(rows.tolist()) for rows in self.index)


# What each rank has of a tensor, and the part of the whole that this should be.
Held = dict[int, tuple[torch.Tensor, Part]]


def whole_part(tensor: torch.Tensor) -> Part:
    return Part((None,) * tensor.dim())


def declared_part(
    declared: Sequence[tuple[int, str]], local: torch.Tensor, whole: torch.Tensor, places: dict[str, int]
) -> Part:
    """The part of a tensor that is cut into equal parts along axes; what is beyond the whole one is padding."""
    index: list[torch.Tensor | None] = [None] * whole.dim()
    for dim, axis in declared:
        rows = torch.arange(local.shape[dim]) + local.shape[dim] * places.get(axis, 0)
        rows[rows >= whole.shape[dim]] = -1
        index[dim] = rows
    return Part(tuple(index))


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def part_of_dtensor(dtensor: Any) -> Part:
    """The part of a DTensor that this rank holds, by its mesh and placements."""
    mesh = dtensor.device_mesh
    summed = [at for at, placement in enumerate(dtensor.placements) if placement.is_partial()]
    partial = tuple(tuple(dist.get_process_group_ranks(mesh.get_group(at))) for at in summed)
    return Part(tuple(indices_of_local(dtensor)), partial)


def local_of(tensor: Any) -> Any:
    """The local tensor of a DTensor; another tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def copy_of_local(tensor: Any) -> torch.Tensor:
    """A copy of what this rank holds of a tensor, on the CPU."""
    with torch.no_grad():
        local = local_of(tensor)
        # DTensor gives one that is still being communicated.
        local = local.wait() if hasattr(local, "wait") else local
        # Gradients of embeddings may be sparse.
        local = local if local.layout == torch.strided else local.to_dense()
        copy: torch.Tensor = local.detach().cpu().clone()
        return copy


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor with its two parts as a last dimension; another tensor itself."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The distances between elements: zero if they are equal, as infinite ones, or both not a number."""
    a, b = as_real(a).double(), as_real(b).double()
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that are finite, in float64. Masks of attention have others."""
    wide = as_real(tensor).double()
    return wide[wide.isfinite()]


def largest(tensor: torch.Tensor) -> float:
    """The largest finite element, without its sign; 0 if there is none."""
    elements = finite(tensor)
    return float(elements.abs().max()) if elements.numel() else 0.0


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def tensor_of_bytes(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The reverse of `bytes_of`."""
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def find_part(local: torch.Tensor, whole: torch.Tensor, tolerance: float = 0.0) -> Part | None:
    """Find the rows or columns of a local tensor in a whole one. Those that are not there are padding, at most half.

    Weights are generic: each is in one place. `tolerance`: of the largest element, for weights that were trained.
    """
    if local.dim() != whole.dim() or local.dtype != whole.dtype:
        return None
    dims = [dim for dim in range(local.dim()) if local.shape[dim] != whole.shape[dim]]
    if not dims:
        return whole_part(local) if are_alike(local, whole, tolerance) else None
    if len(dims) == 1:
        return _found_rows(local, whole, dims[0], tolerance)
    return _found_block(local, whole, dims, tolerance)


def are_alike(local: torch.Tensor, whole: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors of one shape are equal, or differ by no more than `tolerance` of the largest element."""
    if not tolerance or not whole.numel():
        return torch.equal(local, whole)
    return bool(differences(local, whole).max() <= tolerance * largest(whole))


def _found_rows(local: torch.Tensor, whole: torch.Tensor, dim: int, tolerance: float) -> Part | None:
    known = {bytes_of(row): number for number, row in enumerate(whole.unbind(dim))}
    rows = torch.tensor([known.get(bytes_of(row), -1) for row in local.unbind(dim)])
    if tolerance and whole.shape[dim]:
        rows_of = (as_real(each).double().movedim(dim, 0) for each in (local, whole))
        mine, all_rows = (each.reshape(len(each), -1) for each in rows_of)
        near = torch.cdist(mine, all_rows, p=math.inf).min(1)
        bound = tolerance * largest(whole)
        rows = torch.where(near.values <= bound, near.indices, -1)
    if not len(rows) or 2 * int((rows >= 0).sum()) < len(rows):
        return None
    return Part(tuple(rows if each == dim else None for each in range(local.dim())))


def _found_block(local: torch.Tensor, whole: torch.Tensor, dims: Sequence[int], tolerance: float) -> Part | None:
    """The part of a tensor that is cut along several dimensions, each into consecutive equal parts."""
    starts = [range(0, whole.shape[dim] - local.shape[dim] + 1, max(1, local.shape[dim])) for dim in dims]
    for chosen in itertools.product(*starts):
        index: list[torch.Tensor | None] = [None] * local.dim()
        for dim, start in zip(dims, chosen, strict=True):
            index[dim] = torch.arange(start, start + local.shape[dim])
        part = Part(tuple(index))
        if are_alike(local, part.of(whole), tolerance):
            return part
    return None
