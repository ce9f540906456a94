"""Random models for fully_shard, with the same values in every rank."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import Shard

ROWS = 2  # of each rank's batch


@dataclass(frozen=True)
class Layer:
    """A part of a random model, and how fully_shard treats it."""

    size: int
    bias: bool = False
    activation: str = "Identity"
    frozen: bool = False
    wrapped: bool = False
    reshard: bool = False
    last_dim: bool = False  # shard along the last dim of each parameter whose size allows it

    def placement(self, world_size):
        def choose(parameter):
            last = parameter.dim() - 1
            return Shard(last) if self.last_dim and parameter.shape[last] % world_size == 0 else None

        return choose


def model_of(inputs, layers):
    """A model in double precision, with the same values in every rank."""
    modules = []
    for layer in layers:
        linear = nn.Linear(inputs, layer.size, bias=layer.bias, dtype=torch.double)
        with torch.no_grad():
            for number, parameter in enumerate(linear.parameters()):
                values = torch.arange(parameter.numel(), dtype=torch.double) + number + len(modules)
                parameter.copy_(((values * 7) % 11 - 5).reshape(parameter.shape) / 8)
                parameter.requires_grad_(not layer.frozen)
        modules.append(nn.Sequential(linear, getattr(nn, layer.activation)()))
        inputs = layer.size
    return nn.Sequential(*modules)


def batch_of(rank, step, inputs):
    values = torch.arange(ROWS * inputs, dtype=torch.double) + 3 * rank + 5 * step
    return ((values * 5) % 7 - 3).reshape(ROWS, inputs) / 4
