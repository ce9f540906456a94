"""Values of tensors: which are not finite, and how one is overwritten."""

from __future__ import annotations

import math

import torch

# The number that changes nothing in a reduction: a rank that has nothing to add may fill its part with it.
_NEUTRAL = {"max": -math.inf, "min": math.inf}


def neutral_of(op: str | None) -> float | None:
    """The infinity that is to be expected in a reduction; None if there is none."""
    return _NEUTRAL.get(op or "")


def non_finite(tensor: torch.Tensor, neutral: float | None = None) -> tuple[int, int] | None:
    """Counts the NaN and infinities of a tensor, but for those that are `neutral`; None if it has none.

    `_AutoDispatchBelowAutograd`: 2.11 to 2.15.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # reading it would end the capture of a CUDA graph; NCCL's own check is in the graph
    with torch._C._AutoDispatchBelowAutograd():
        data = tensor if tensor.element_size() > 1 else tensor.to(torch.float32)
        if bool(torch.isfinite(data).all()):
            return None
        infinite = torch.isinf(data) if neutral is None else torch.isinf(data) & (data != neutral)
        found = int(torch.isnan(data).sum()), int(infinite.sum())
        return found if any(found) else None


def overwrite(tensor: torch.Tensor, value: float) -> None:
    """Fill a tensor without a trace in autograd: neither a gradient nor a new version."""
    with torch.no_grad():
        tensor.data.fill_(value)
