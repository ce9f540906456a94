"""Compares the gradients of a split backward, inputs first and weights later, with those of an ordinary backward."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

Forward = Callable[[dict[str, nn.Parameter], list[torch.Tensor]], list[torch.Tensor]]


def wrong(names: list[str], trained: list[bool], forward: Forward) -> list[str]:
    """The weights, of 3 x 3 each, and the inputs whose gradients differ. `trained`: which inputs require gradients."""
    torch.manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(3, 3, dtype=torch.double)) for name in names}
    inputs = [torch.randn(3, 3, dtype=torch.double).requires_grad_(needed) for needed in trained]
    outputs = forward(weights, inputs)
    given = [torch.randn_like(output) for output in outputs]
    named = {**weights, **{f"input {number}": one for number, one in enumerate(inputs) if one.requires_grad}}
    wanted = torch.autograd.grad(
        [output for output in outputs if output.requires_grad],
        list(named.values()),
        [gradient for output, gradient in zip(outputs, given, strict=True) if output.requires_grad],
        allow_unused=True,
    )
    _, groups = stage_backward_input(forward(weights, inputs), given, inputs, iter(weights.values()))
    stage_backward_weight(iter(weights.values()), groups)
    return [
        f"{name}: {tensor.grad}, not {gradient}"
        for (name, tensor), gradient in zip(named.items(), wanted, strict=True)
        if not (
            tensor.grad is gradient is None
            or (tensor.grad is not None and gradient is not None and torch.allclose(tensor.grad, gradient))
        )
    ]
