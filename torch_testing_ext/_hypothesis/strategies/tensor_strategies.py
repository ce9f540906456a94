"""Shapes, dtypes and tensors that often break distributed code: empty, prime and uneven sizes, size 1, odd strides.

Values are small whole numbers, all different if the tensor is small enough. Their sums are exact in every dtype used
here, so results can be compared exactly, and an element in the wrong place is detected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

Shape = tuple[int, ...]
Shapes = st.SearchStrategy[Shape]
Dtypes = st.SearchStrategy[torch.dtype]
# The simplest first: Hypothesis shrinks towards the front.
SIZES = (1, 2, 3, 0, 4, 5, 6, 7, 8, 11, 13)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bfloat16,
    torch.uint8,
    torch.bool,
)
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
_LAYOUTS = ("contiguous", "transposed", "strided", "offset")
# Every whole number below this is exact in bfloat16, and so are its sums over a few ranks.
_LARGEST = 61


def dtypes(floating: bool = False) -> Dtypes:
    """Dtypes; with `floating`, only floating-point ones."""
    return st.sampled_from(FLOATS if floating else DTYPES)


def shapes(
    min_dims: int = 0,
    max_dims: int = 3,
    sizes: Sequence[int] = SIZES,
    max_numel: int = 512,
) -> Shapes:
    """Shapes, including dims of size 0, size 1 and prime sizes."""
    size = st.sampled_from(list(sizes))
    several = st.lists(size, min_size=min_dims, max_size=max_dims).map(tuple)
    return several.filter(lambda shape: math.prod(shape) <= max_numel)


def tensors(
    shape: Shapes | Sequence[int] | None = None,
    dtype: Dtypes | torch.dtype | None = None,
    contiguous: bool | None = None,
) -> st.SearchStrategy[torch.Tensor]:
    """CPU tensors. `contiguous`: True, False (if the shape allows it) or None for either."""
    if shape is None:
        shape = shapes()
    elif not isinstance(shape, st.SearchStrategy):
        shape = st.just(tuple(shape))
    if dtype is None:
        dtype = dtypes()
    elif not isinstance(dtype, st.SearchStrategy):
        dtype = st.just(dtype)
    layouts = st.sampled_from(_layouts(contiguous))
    starts = st.integers(0, 7)
    return st.builds(_make, shape, dtype, layouts, starts)


def _layouts(contiguous: bool | None) -> Sequence[str]:
    first, *others = _LAYOUTS
    if contiguous is None:
        return _LAYOUTS
    return [first] if contiguous else others


def _make(shape: Shape, dtype: torch.dtype, layout: str, start: int) -> torch.Tensor:
    tensor = whole_numbers(shape, dtype, start)
    return lay_out(tensor, layout)


def whole_numbers(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    start: int = 0,
) -> torch.Tensor:
    """Return start, start + 1, ... in row-major order, modulo a number up to which sums stay exact."""
    numbers = torch.arange(math.prod(shape)) + start
    values = numbers % _LARGEST
    if dtype is torch.bool:
        values = values % 2
    return values.reshape(tuple(shape)).to(dtype)


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor with the same values and other strides."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.dim() > 0:
        with_gaps = torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)
        return with_gaps[..., 0]
    if layout == "offset":
        gap = tensor.new_zeros(1)
        behind_gap = torch.cat([gap, tensor.reshape(-1)])[1:]
        return behind_gap.reshape(tensor.shape)
    return tensor
