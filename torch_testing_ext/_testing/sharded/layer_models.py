"""Small models of plain layers, independent of DTensor, for tests to shard."""

import torch
from torch import nn

from .wrapper_models import InOrder


class RMSNormPython(nn.Module):
    """RMS norm written as pointwise operations and one mean, so that DTensor handles each of them separately."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.eps) * self.weight


class MLPModule(InOrder):
    """Linear 10-16, ReLU, Linear 16-10. It sets the seed itself, so all instances start with equal parameters."""

    def __init__(self, device: torch.device | str | None, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net1 = nn.Linear(10, 16, bias=bias, device=device)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 10, bias=bias, device=device)

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
