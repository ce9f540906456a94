"""Changes to torch under a training that is compared: its precision, its dropout, and who sees its norms."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_testing_ext._torch import replacing
from torch_testing_ext._torch.training import is_in_backward, outside_dynamo

LOW = (torch.float32, torch.float16, torch.bfloat16)
# The forwards with which pipelines learn shapes: 2.13 runs a real microbatch, forward and backward.
LEARNS_SHAPES = ("_forward_metadata_inference", "_shape_inference")


def import_what_training_uses() -> None:
    """Import what optimizers and parallel models import at their first use: once, before ranks are forked."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401


def is_training() -> bool:
    """Whether this forward is a part of training: no evaluation, no recomputation, no pipeline's look at shapes."""
    if not torch.is_grad_enabled() or is_in_backward():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in LEARNS_SHAPES:
            return False
        frame = frame.f_back
    return True


def compute_in_float64() -> None:
    """Let `float()`, `half()`, `bfloat16()` and `to(dtype)` give float64 from now on.

    An argument `dtype=torch.float32` and what torch.compile traces are not changed.
    """
    to: Any = torch.Tensor.to

    def widened(name: str, original: Any) -> Any:
        if name != "to":
            return lambda self, **options: to(self, torch.float64)

        def wide_to(self: Any, *args: Any, **options: Any) -> Any:
            wide = [torch.float64 if value in LOW else value for value in args if not isinstance(value, torch.Tensor)]
            named = {key: torch.float64 if key == "dtype" and value in LOW else value for key, value in options.items()}
            return original(self, *(args if len(wide) < len(args) else wide), **named)

        return wide_to

    replacing.replace_for_good("lower precision of a layout", widened)


def drop_by_values(note: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Let the mask of `F.dropout` follow from the values that it drops, so that it is the same in all layouts.

    `note` is given the input and the mask that torch would have drawn, unless the input is computed again.
    """

    @outside_dynamo
    def dropped(input: Any, p: float) -> Any:
        with torch.no_grad():
            drawn = torch.dropout(torch.ones_like(input), p, True)
            if not is_in_backward():
                note(input, drawn != 0)
            keep = ((input.double() * 1e6).round().sin() * 43758.5453).frac().abs() >= p
        return input * keep / (1 - p)

    def make(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            return dropped(input, p) if training and p else original(input, p, training, inplace)

        return dropout

    replacing.replace_for_good("dropout of a layout", make)


def drop_nothing() -> None:
    """Let `F.dropout` keep all values, for a comparison in which rounding would change masks that follow from them."""

    def make(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            return original(input, p, False, inplace)

        return dropout

    replacing.replace_for_good("dropout of a layout", make)


def before_norms(look: Callable[[], None]) -> None:
    """Call a function before torch computes the norm of gradients, as all of its clipping does."""

    def make(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def seen(*args: Any, **options: Any) -> Any:
            look()
            return original(*args, **options)

        return seen

    replacing.replace_for_good("norms of a layout", make)
