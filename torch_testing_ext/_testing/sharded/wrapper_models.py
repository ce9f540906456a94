"""Plain models for tests of wrappers, composable ones (`replicate`, `fully_shard`, `checkpoint`) and others.

They nest modules, and some have parameters and buffers of their own next to those of their submodules.
"""

import torch
from torch import nn

WIDTH = 100


def _linear(device: torch.device) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, device=device)


def _square(device: torch.device) -> torch.Tensor:
    return torch.randn((WIDTH, WIDTH), device=device)


class InOrder(nn.Module):
    """Runs its modules one after the other, in the order in which they were made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


class UnitModule(InOrder):
    """Three linear layers, with ReLU before and after the middle one."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.l1 = _linear(device)
        self.seq = nn.Sequential(nn.ReLU(), _linear(device), nn.ReLU())
        self.l2 = _linear(device)


class CompositeModel(InOrder):
    """Two units between two linear layers."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.l1 = _linear(device)
        self.u1 = UnitModule(device)
        self.u2 = UnitModule(device)
        self.l2 = _linear(device)


class UnitParamModule(InOrder):
    """A unit whose last layer is a plain parameter."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.l = _linear(device)
        self.seq = nn.Sequential(nn.ReLU(), _linear(device), nn.ReLU())
        self.p = nn.Parameter(_square(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.p


class CompositeParamModel(InOrder):
    """Two units, then a plain parameter; it also has a persistent buffer, which the forward does not read."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.l = _linear(device)
        self.u1 = UnitModule(device)
        self.u2 = UnitModule(device)
        self.p = nn.Parameter(_square(device))
        self.register_buffer("buffer", _square(device), persistent=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.p


class FakeSequential(nn.Module):
    """Runs modules in order, but is no nn.Sequential and does not register them.

    Wrap policies that look for nn.Sequential, or walk over submodules, ignore it.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self._module_sequence = list(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self._module_sequence:
            x = module(x)
        return x


class NestedSequentialModel(InOrder):
    """Nested modules for which breadth-first and depth-first walks differ."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        inner = FakeSequential(nn.Linear(1, 1, device=device))
        middle = FakeSequential(nn.Linear(1, 1, device=device), nn.ReLU(), inner, nn.ReLU())
        last = FakeSequential(nn.Linear(3, 2, bias=False, device=device), nn.Linear(2, 4, bias=False, device=device))
        self.seq1 = nn.Sequential(nn.Linear(1, 1, device=device), middle, nn.Linear(1, 2, device=device))
        self.lin = nn.Linear(2, 2, device=device)
        self.seq2 = nn.Sequential(nn.ReLU(), nn.Linear(2, 3, device=device), last)


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


class SaveForwardInputsModel(InOrder):
    """Two SaveForwardInputsModules, one after the other; the model records its own input, too."""

    def __init__(self, forward_inputs: dict[nn.Module, torch.Tensor], cast_forward_inputs: bool) -> None:
        super().__init__()
        self.c1 = SaveForwardInputsModule(forward_inputs, cast_forward_inputs)
        self.c2 = SaveForwardInputsModule(forward_inputs, cast_forward_inputs)
        self.forward_inputs = forward_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_inputs[self] = x
        return super().forward(x)
