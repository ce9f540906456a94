"""Snapshots of everything that a call changes, to undo a run of the step."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import local_tensor, tree

from ..trace.substitution import reinstate
from ..trace.train_state import StepState

_tree = tree()


def local_part(value: Any) -> Any:
    """The local tensor of a DTensor; any other value itself."""
    return local_tensor(value) if isinstance(value, DTensor) else value


class RandomState:
    """The states of the random generators of torch, Python and numpy, and of `others`."""

    def __init__(self, device: torch.device, others: Iterable[torch.Generator] = ()) -> None:
        self.others = [(generator, generator.get_state()) for generator in others]
        self.module: Any = getattr(torch, device.type) if device.type != "cpu" else None
        self.cpu, self.python = torch.get_rng_state(), random.getstate()
        self.device = None if self.module is None else self.module.get_rng_state()
        self.numpy: Any = sys.modules.get("numpy")  # torch does not require it
        self.in_numpy = None if self.numpy is None else self.numpy.random.get_state()

    def restore(self) -> None:
        for generator, state in self.others:
            generator.set_state(state)
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        if self.device is not None:
            self.module.set_rng_state(self.device)
        if self.numpy is not None:
            self.numpy.random.set_state(self.in_numpy)


class TensorValues:
    """The values of tensors; of DTensors, the values of the local part."""

    def __init__(self, tensors: list[Any]) -> None:
        unique = {id(tensor): tensor for tensor in map(local_part, tensors) if isinstance(tensor, torch.Tensor)}
        self.copies = [(tensor.detach(), tensor.detach().clone()) for tensor in unique.values()]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, copy in self.copies:
                tensor.copy_(copy)


class ModuleContents:
    """The attributes and registries of all modules, without the values of tensors."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.contents = [
            (module, dict(module.__dict__), [dict(registry) for registry in _registries(module)]) for module in modules
        ]

    def restore(self) -> None:
        for module, attributes, registries in self.contents:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for registry, content in zip(_registries(module), registries, strict=True):
                registry.clear()
                registry.update(content)


def _registries(module: nn.Module) -> list[dict[str, Any]]:
    return [module._parameters, module._buffers, module._modules]


class StateSnapshot:
    """All modules and optimizers of a step, with the values of all tensors."""

    def __init__(self, state: StepState) -> None:
        self.state = state
        self.modules = ModuleContents(state.modules)
        self.refs = [(ref, ref.value) for ref in (*state.params, *state.buffers)]
        self.grads = [(ref.value, ref.value.grad) for ref in state.params]
        self.groups = [(o, [(group, dict(group), list(group["params"])) for group in o.param_groups])
                       for o in state.optimizers]  # fmt: skip
        self.states = [(o, {key: (value, _shallow(value)) for key, value in o.state.items()}) for o in state.optimizers]
        tensors = [value for _, value in self.refs] + [grad for _, grad in self.grads]
        tensors += [leaf for entry in state.optimizer_states() for leaf in entry.leaves]
        self.values = TensorValues(tensors)
        self.random = RandomState(state.device)

    def restore(self) -> None:
        for _, value in self.refs:
            reinstate(value)
        self.modules.restore()
        for ref, value in self.refs:
            ref.value = value
        self.state.reindex()
        for param, grad in self.grads:
            param.grad = grad
        for optimizer, groups in self.groups:
            optimizer.param_groups[:] = [group for group, _, _ in groups]
            for group, settings, params in groups:
                group.clear()
                group.update(settings)
                group["params"][:] = params
        for optimizer, states in self.states:
            optimizer.state.clear()
            for key, (value, content) in states.items():
                if content is not None:
                    value.clear()
                    value.update(content)
                optimizer.state[key] = value
        self.values.restore()
        self.random.restore()


def _shallow(value: Any) -> dict[Any, Any] | None:
    return dict(value) if isinstance(value, dict) else None
