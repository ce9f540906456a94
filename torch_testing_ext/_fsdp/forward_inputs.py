"""Models that keep what their forward was called with."""

from __future__ import annotations

import torch
from torch import nn


class SaveForwardInputsModule(nn.Module):
    """A linear layer that notes its input under itself, and may cast it to its weight's dtype."""

    def __init__(self, forward_inputs: dict[nn.Module, torch.Tensor], cast_forward_inputs: bool) -> None:
        super().__init__()
        self.l = nn.Linear(100, 100)
        self.forward_inputs = forward_inputs
        self.cast_forward_inputs = cast_forward_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_inputs[self] = x
        if self.cast_forward_inputs:
            x = x.to(self.l.weight.dtype)
        return self.l(x)


class SaveForwardInputsModel(nn.Module):
    """Two of them, one after the other; it notes its own input too."""

    def __init__(self, forward_inputs: dict[nn.Module, torch.Tensor], cast_forward_inputs: bool) -> None:
        super().__init__()
        self.c1 = SaveForwardInputsModule(forward_inputs, cast_forward_inputs)
        self.c2 = SaveForwardInputsModule(forward_inputs, cast_forward_inputs)
        self.forward_inputs = forward_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_inputs[self] = x
        return self.c2(self.c1(x))
