"""Snapshots of everything that a call may change, to undo a run of the step."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch.spmd import local_tensor, set_local_tensor, tree

from ..engine.state_finder import FoundState

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class RandomState:
    """The states of the random generators of torch, Python and numpy."""

    def __init__(self) -> None:
        self._cpu, self._python = torch.get_rng_state(), random.getstate()
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._module: Any = None if accelerator is None else getattr(torch, accelerator.type)
        self._device = None if self._module is None else self._module.get_rng_state()
        self._numpy: Any = sys.modules.get("numpy")  # torch does not require it
        self._in_numpy = None if self._numpy is None else self._numpy.random.get_state()

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        if self._module is not None:
            self._module.set_rng_state(self._device)
        if self._numpy is not None:
            self._numpy.random.set_state(self._in_numpy)


class ModuleContents:
    """The attributes and registries of modules, and which objects optimizers hold, without the values of tensors."""

    def __init__(self, found: FoundState) -> None:
        modules = [*dict.fromkeys(module for root in found.modules for module in root.modules())]
        self._modules = [(m, dict(m.__dict__), [dict(getattr(m, name)) for name in _REGISTRIES]) for m in modules]
        self._optimizers = [_contents(optimizer) for optimizer in found.optimizers]

    def restore(self) -> None:
        for module, attributes, registries in self._modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, content in zip(_REGISTRIES, registries, strict=True):
                registry = getattr(module, name)
                registry.clear()
                registry.update(content)
        for optimizer, attributes, groups, states in self._optimizers:
            optimizer.__dict__.clear()
            optimizer.__dict__.update(attributes)
            optimizer.param_groups[:] = [group for group, _, _ in groups]
            for group, settings, params in groups:
                group.clear()
                group.update(settings)
                group["params"][:] = params
            optimizer.state.clear()
            for key, value, content in states:
                if content is not None:
                    value.clear()
                    value.update(content)
                optimizer.state[key] = value


def _contents(optimizer: Optimizer) -> tuple[Any, ...]:
    groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]
    states = [(k, v, dict(v) if isinstance(v, dict) else None) for k, v in optimizer.state.items()]
    return optimizer, dict(optimizer.__dict__), groups, states


class StateSnapshot:
    """Modules and optimizers, with the values of all their tensors, of gradients, and of `others`."""

    def __init__(self, found: FoundState, others: Iterable[torch.Tensor] = ()) -> None:
        self._contents, self._random = ModuleContents(found), RandomState()
        slots = [t for root in found.modules for t in (*root.parameters(), *root.buffers())]
        held = [param for optimizer in found.optimizers for group in optimizer.param_groups for param in group["params"]]
        states = [leaf for o in found.optimizers for leaf in tree().tree_leaves(dict(o.state))]
        tensors = {id(t): t for t in (*slots, *held, *states, *others) if isinstance(t, torch.Tensor)}
        self._held = [_HeldTensor(tensor) for tensor in tensors.values()]

    @torch.no_grad()
    def restore(self) -> None:
        self._contents.restore()
        for each in self._held:
            each.restore()
        self._random.restore()


class _HeldTensor:
    """A tensor with its memory, a copy of its values, and its gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.trainable = tensor, tensor.requires_grad
        self.attributes = dict(tensor.__dict__)
        self.memory = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
        self.values = self.memory.clone()
        self.grad = _HeldTensor(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None

    def restore(self) -> None:
        tensor = self.tensor
        self.memory.copy_(self.values)
        tensor.__dict__.update(self.attributes)
        if isinstance(tensor, DTensor):
            set_local_tensor(tensor, self.memory)
        elif self.memory.layout is torch.strided and tensor.data_ptr() != self.memory.data_ptr():
            tensor.data = self.memory
        if tensor.is_leaf:
            tensor.requires_grad_(self.trainable)
            tensor.grad = None if self.grad is None else self.grad.tensor
        if self.grad is not None:
            self.grad.restore()


def captured_tensors(module: torch.fx.GraphModule) -> list[torch.Tensor]:
    """The tensors outside of model and optimizers that a program uses."""
    values = [getattr(module, str(node.target), None) for node in module.graph.nodes if node.op == "get_attr"]
    return [value for value in values if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)]
