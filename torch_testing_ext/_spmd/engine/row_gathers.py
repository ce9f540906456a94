"""Gathers rows: fills whole tensors, of which each rank has its own rows, with those of all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .bucket_plan import plan_buckets
from .managed_params import ManagedParam
from .wire import Wire

_BUCKET_BYTES = 32 * 2**20
_DIRECT_BYTES = 256 * 1024  # from this size on, rows travel without a copy


@dataclass
class RowGather:
    """One gather: the rank's rows, and the whole tensor to fill."""

    managed: ManagedParam
    rows: torch.Tensor
    whole: torch.Tensor


def gather_rows(wire: Wire, gathers: Iterable[RowGather]) -> None:
    """Gather into all whole tensors."""
    small, works = [], []
    for gather in gathers:
        if wire.world == 1:
            gather.whole.copy_(gather.rows)
        elif _is_direct(gather):
            works.append(wire.start_gather(gather.whole.view(-1), gather.rows.reshape(-1)))
        else:
            small.append(gather)
    sizes = [gather.whole.nbytes for gather in small]
    kinds = [(gather.whole.dtype, gather.whole.device) for gather in small]
    buckets = [_start(wire, [small[i] for i in some]) for some in plan_buckets(sizes, kinds, _BUCKET_BYTES)]
    for work in works:
        work.wait()
    for some, got, work in buckets:
        work.wait()
        _unpack(wire, some, got)


def _is_direct(gather: RowGather) -> bool:
    is_large = gather.whole.nbytes >= _DIRECT_BYTES
    return is_large and gather.managed.layout.even and gather.whole.is_contiguous()


def _start(wire: Wire, gathers: list[RowGather]) -> tuple[list[RowGather], torch.Tensor, Any]:
    sizes = _sizes(gathers)
    like = gathers[0].whole
    mine = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
    for gather, part in zip(gathers, mine.split(sizes), strict=True):  # type: ignore[no-untyped-call]
        part[: gather.rows.numel()].view(gather.rows.shape).copy_(gather.rows)
    got = mine.new_empty(wire.world * len(mine))
    return gathers, got, wire.start_gather(got, mine)


def _unpack(wire: Wire, gathers: Sequence[RowGather], got: torch.Tensor) -> None:
    sizes = _sizes(gathers)
    for rank, block in enumerate(got.chunk(wire.world)):
        for gather, part in zip(gathers, block.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            theirs = gather.managed.rows(gather.whole, rank)
            theirs.copy_(part[: theirs.numel()].view(theirs.shape))


def _sizes(gathers: Sequence[RowGather]) -> list[int]:
    return [gather.managed.layout.padded_numel for gather in gathers]
