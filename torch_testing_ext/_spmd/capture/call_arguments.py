"""The arguments of a call: their leaves, and a signature that identifies the programs that may take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_testing_ext._torch.spmd import kernel_choices, tree

from ..spmd_errors import SPMDError

_tree = tree()
_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device)


class CallArguments:
    """The arguments of one call, in the order of pytree's leaves."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, function: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves, self._spec = _tree.tree_flatten((args, kwargs))
        key: list[Any] = [self._spec, getattr(function, "__code__", None), *map(_key_of, self.leaves)]
        if len({*map(id, self.leaves)}) != len(self.leaves):
            first: dict[int, int] = {}
            key.append(tuple([first.setdefault(id(leaf), i) for i, leaf in enumerate(self.leaves)]))
        self.signature = tuple(key), _modes(device)

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def rebuilt(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other leaves."""
        args, kwargs = _tree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def admit(self) -> None:
        """Refuse tensors that a program cannot take."""
        for leaf in self.tensors():
            plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
            if not plain or leaf.requires_grad or leaf.is_conj():
                kind = f"{type(leaf).__name__} of shape {tuple(leaf.shape)}, {leaf.layout}"
                what = f"A program cannot take an argument: {kind}, requires_grad={leaf.requires_grad}."
                raise SPMDError(what, remedy='Pass plain tensors without gradients, or drop backend="capture".')


def _key_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return type(leaf), leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) in _PLAIN:
        return type(leaf), leaf or str(leaf)  # zeros of both signs are equal
    return id(leaf)  # modules, optimizers, and opaque objects: programs keep them alive


def _modes(device: str) -> tuple[Any, ...]:
    """The modes of torch in which the step is called."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        kernel_choices(),
    )
