"""Small models of plain layers: what a test shards first. They know nothing of DTensor."""

from __future__ import annotations

import torch
from torch import nn


class RMSNormPython(nn.Module):
    """RMS norm spelt out in pointwise operations and one mean, so that each of them meets DTensor on its own."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.eps) * self.weight


class MLPModule(nn.Module):
    """Linear 10-16, ReLU, Linear 16-10. The seed is part of the model: two of them always start equal."""

    def __init__(self, device: torch.device | str | None, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net1 = nn.Linear(10, 16, bias=bias, device=device)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 10, bias=bias, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))

    def reset_parameters(self) -> None:
        for linear in (self.net1, self.net2):
            linear.reset_parameters()


class MLPStacked(nn.Module):
    """`n_layers` equal MLPModules, one after the other."""

    def __init__(self, device: torch.device | str | None, n_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLPModule(device) for _ in range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
