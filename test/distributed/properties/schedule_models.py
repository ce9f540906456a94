"""Random models for pipelines, with the same values in every rank."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Part:
    """A kind of stage."""

    size: int
    bias: bool = False
    activation: str = "Identity"
    outputs: int = 1  # tensors that it passes on; the last stage has one
    frozen: bool = False


def values(shape, start):
    """Return numbers in double precision that are the same in every rank."""
    count = torch.Size(shape).numel()
    return (((torch.arange(count, dtype=torch.double) + start) * 7) % 11 - 5).reshape(shape) / 8


class Stage(nn.Module):
    def __init__(self, inputs, part, number, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, part.size, bias=part.bias, dtype=torch.double)
        self.activation = getattr(nn, part.activation)()
        self.outputs = outputs
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(values(parameter.shape, number + parameter.dim()))
                parameter.requires_grad_(not part.frozen)

    def forward(self, tensor, shift=0, scale=None):
        hidden = self.activation(self.linear(tensor) + shift)
        if scale is not None:
            hidden = hidden * scale
        return hidden if self.outputs == 1 else (hidden, hidden.sum(dim=-1, keepdim=True))


def stages_of(count, inputs, parts):
    """Return the stages of a model, which repeats the parts."""
    stages = []
    for number in range(count):
        part = parts[number % len(parts)]
        outputs = 1 if number == count - 1 else part.outputs
        stages.append(Stage(inputs, part, number, outputs))
        inputs = part.size
    return stages


def run_all(stages, batch, options):
    tensors = (batch,)
    for stage in stages:
        outputs = stage(*tensors, **options)
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return tensors[0]
