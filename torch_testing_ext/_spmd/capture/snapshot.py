"""Snapshots of everything that a call may change, to undo a run of the step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_testing_ext._machine.seeds import RandomState
from torch_testing_ext._torch.spmd import local_tensor, set_local_tensor, tree

from ..engine.state_finder import FoundState


class ModuleContents:
    """The attributes and registries of modules, and which objects optimizers hold, without the values of tensors."""

    def __init__(self, found: FoundState) -> None:
        modules = [*dict.fromkeys(module for root in found.modules for module in root.modules())]
        registries = [registry for m in modules for registry in (m._parameters, m._buffers, m._modules)]
        owners = [*modules, *found.optimizers]
        states = [value for o in found.optimizers for value in o.state.values() if isinstance(value, dict)]
        groups = [group for optimizer in found.optimizers for group in optimizer.param_groups]
        dicts = [*(owner.__dict__ for owner in owners), *registries, *(o.state for o in found.optimizers)]
        self._dicts = [(each, dict(each)) for each in (*dicts, *states, *groups)]
        lists = [*(o.param_groups for o in found.optimizers), *(group["params"] for group in groups)]
        self._lists: list[tuple[list[Any], list[Any]]] = [(each, list(each)) for each in lists]

    def restore(self) -> None:
        for each, content in self._dicts:
            each.clear()
            each.update(content)
        for items, kept in self._lists:
            items[:] = kept


class StateSnapshot:
    """Modules and optimizers, with the values of all their tensors, of gradients, and of `others`."""

    def __init__(self, found: FoundState, others: Iterable[torch.Tensor] = ()) -> None:
        self._contents, self._random = ModuleContents(found), RandomState()
        slots = [t for root in found.modules for t in (*root.parameters(), *root.buffers())]
        held = [
            param for optimizer in found.optimizers for group in optimizer.param_groups for param in group["params"]
        ]
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
