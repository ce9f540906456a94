"""Snapshots of everything that a call may change, to undo a run of the step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_testing_ext._machine.accelerators import RandomState
from torch_testing_ext._torch.tracing import local_tensor, set_local_tensor, tree

from .roster import FoundState


class ModuleContents:
    """The attributes and registries of modules, and which objects optimizers hold, without the values of tensors."""

    def __init__(self, found: FoundState) -> None:
        dicts: list[Any] = []
        lists: list[list[Any]] = []
        for module in dict.fromkeys(module for root in found.modules for module in root.modules()):
            dicts += [module.__dict__, module._parameters, module._buffers, module._modules]
        for optimizer in found.optimizers:
            dicts += [optimizer.__dict__, optimizer.state, *optimizer.param_groups]
            dicts += [value for value in optimizer.state.values() if isinstance(value, dict)]
            lists.append(optimizer.param_groups)
            lists += [group["params"] for group in optimizer.param_groups]
        self._dicts = [(changed, dict(changed)) for changed in dicts]
        self._lists = [(changed, list(changed)) for changed in lists]

    def restore(self) -> None:
        for changed, content in self._dicts:
            changed.clear()
            changed.update(content)
        for changed_list, items in self._lists:
            changed_list[:] = items


class StateSnapshot:
    """Modules and optimizers, with the values of all their tensors, of gradients, and of `others`."""

    def __init__(self, found: FoundState, others: Iterable[torch.Tensor] = ()) -> None:
        self._contents = ModuleContents(found)
        self._random = RandomState()
        values: list[Any] = []
        for root in found.modules:
            values += [*root.parameters(), *root.buffers()]
        for optimizer in found.optimizers:
            for group in optimizer.param_groups:
                values += group["params"]
        for optimizer in found.optimizers:
            values += tree().tree_leaves(dict(optimizer.state))
        tensors = {id(value): value for value in (*values, *others) if isinstance(value, torch.Tensor)}
        self._kept = [_KeptTensor(tensor) for tensor in tensors.values()]

    @torch.no_grad()
    def restore(self) -> None:
        self._contents.restore()
        for tensor in self._kept:
            tensor.restore()
        self._random.restore()


class _KeptTensor:
    """A tensor with its memory, a copy of its values, and its gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.trainable = tensor.requires_grad
        self.attributes = dict(tensor.__dict__)
        self.memory = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
        self.values = self.memory.clone()
        self.grad = _KeptTensor(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None

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
