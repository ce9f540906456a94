"""Models that record the inputs of their forward."""

from __future__ import annotations

import torch
from torch import nn


class SaveForwardInputsModule(nn.Module):
    """A linear layer that records its input, with itself as the key, and may cast it to its weight's dtype."""

    def __init__(self, forward_inputs: dict[nn.Module, torch.Tensor], cast_forward_inputs: bool) -> None:
        super().__init__()
        self.l = nn.Linear(100, 100)
        self.forward_inputs = forward_inputs
        self.cast_forward_inputs = cast_forward_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_inputs[self] = x
        if self.cast_forward_inputs:
            x = x.to(self.l.weight.dtype)
        output: torch.Tensor = self.l(x)
        return output


class SaveForwardInputsModel(nn.Module):
    """Two SaveForwardInputsModules, one after the other; the model records its own input, too."""

    def __init__(self, forward_inputs: dict[nn.Module, torch.Tensor], cast_forward_inputs: bool) -> None:
        super().__init__()
        self.c1 = SaveForwardInputsModule(forward_inputs, cast_forward_inputs)
        self.c2 = SaveForwardInputsModule(forward_inputs, cast_forward_inputs)
        self.forward_inputs = forward_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_inputs[self] = x
        output: torch.Tensor = self.c2(self.c1(x))
        return output
