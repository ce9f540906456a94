"""Marker operations: they stand in a recorded graph where it needs the other ranks, until they are lowered.

They compute nothing: each returns a new tensor of the right shape, and only while a step is recorded.
"""

from __future__ import annotations

from typing import Any

import torch

_new_library: Any = torch.library.Library  # untyped in torch
_library = _new_library("torch_testing_ext_spmd", "FRAGMENT")


def _define(name: str, arguments: str) -> Any:
    _library.define(f"{name}({arguments}) -> Tensor")
    _library.impl(name, _new_tensor, "Meta")
    return getattr(torch.ops.torch_testing_ext_spmd, name).default


def _new_tensor(tensor: torch.Tensor, _param: int, shape: list[int]) -> torch.Tensor:
    return tensor.new_empty(shape)


# Each takes a tensor, the number of its parameter, and the shape of the result.
AVERAGE = _define("average", "Tensor grad, int param, int[] shape")  # the mean of a gradient over ranks
SCATTER = _define("scatter", "Tensor grad, int param, int[] shape")  # this rank's rows of the mean
GATHER = _define("gather", "Tensor rows, int param, int[] shape")  # the whole tensor of all ranks' rows
ROWS = _define("rows", "Tensor whole, int param, int[] shape")  # this rank's rows
