"""The state of a train step: parameters, buffers, gradients and optimizer states.

`collect_state` reads modules and optimizers and refuses those that cannot be made data parallel. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch.spmd import tree

from ..spmd_errors import SPMDError

_tree = tree()


@dataclass
class TensorSlot:
    """One place in a module where a tensor is registered."""

    module: nn.Module
    name: str


@dataclass
class TensorRef:
    """A parameter or buffer and all slots that hold it. Tied weights have one `TensorRef` with several slots."""

    name: str
    value: torch.Tensor
    slots: list[TensorSlot] = field(default_factory=list)


@dataclass
class StateEntry:
    """The value under one key of an optimizer's state, flattened."""

    optimizer: int
    owner: int | None  # index of the parameter, or None if the key is not a parameter
    key: Any
    value: Any
    leaves: list[Any]
    names: list[str]
    spec: Any

    @property
    def structure(self) -> tuple[Any, ...]:
        """Everything that a traced program may depend on: all except the values inside tensors."""
        leaves = tuple(_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves)
        return (self.optimizer, self.owner if self.owner is not None else self.key, self.spec, leaves)


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device, isinstance(tensor, DTensor)


@dataclass
class StepState:
    """All modules and optimizers of a step, with the tensors they hold."""

    modules: list[nn.Module]  # every submodule, once
    module_names: list[str]
    params: list[TensorRef]
    buffers: list[TensorRef]
    optimizers: list[Optimizer]

    def index_of(self, param: torch.Tensor) -> int | None:
        """The index of a parameter, or None if no module has it."""
        return self._by_id.get(id(param))

    def known_index(self, param: torch.Tensor) -> int:
        """The index of a parameter that one of the modules has."""
        return self._by_id[id(param)]

    def reindex(self) -> None:
        """Update the index after the values of parameters have been replaced."""
        self._by_id = {id(ref.value): i for i, ref in enumerate(self.params)}

    def __post_init__(self) -> None:
        self.reindex()

    def optimizer_states(self) -> list[StateEntry]:
        """The current state of all optimizers, one entry per key."""
        entries = []
        for i, optimizer in enumerate(self.optimizers):
            for key, value in optimizer.state.items():
                owner = self.index_of(key) if isinstance(key, torch.Tensor) else None
                paths, spec = _tree.tree_flatten_with_path(value)
                names = [str(_tree.keystr(path)) for path, _ in paths]
                entries.append(StateEntry(i, owner, key, value, [leaf for _, leaf in paths], names, spec))
        return entries

    @property
    def device(self) -> torch.device:
        return self.params[0].value.device


def collect_state(leaves: list[Any]) -> StepState:
    """Collect the state of all modules and optimizers among the step's arguments."""
    modules = _unique(leaf for leaf in leaves if isinstance(leaf, nn.Module))
    optimizers = _unique(leaf for leaf in leaves if isinstance(leaf, Optimizer))
    if not modules:
        raise SPMDError(
            "The step was called without a module among its arguments.",
            remedy="Pass the model (and the optimizer) as arguments: step(model, optimizer, batch).",
        )
    for module in modules:
        _refuse_wrapped(module)
    submodules: dict[nn.Module, str] = {}
    for i, module in enumerate(modules):
        prefix = "" if len(modules) == 1 else str(i)
        for name, submodule in module.named_modules(prefix=prefix):
            submodules.setdefault(submodule, name)
    state = StepState(
        list(submodules),
        list(submodules.values()),
        _tensor_refs(submodules, "_parameters"),
        _tensor_refs(submodules, "_buffers"),
        optimizers,
    )
    _refuse_unsupported_parameters(state)
    _refuse_foreign_parameters(state)
    return state


def _unique(values: Iterator[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def _tensor_refs(modules: dict[nn.Module, str], registry: str) -> list[TensorRef]:
    found: dict[int, TensorRef] = {}
    for module, prefix in modules.items():
        for name, value in getattr(module, registry).items():
            if value is not None:
                ref = found.setdefault(id(value), TensorRef(f"{prefix}.{name}" if prefix else name, value))
                ref.slots.append(TensorSlot(module, name))
    return list(found.values())


# Recognized by class name: importing the FSDP packages for an isinstance check would cost every rank half a second.
_WRAPPERS = {
    "DistributedDataParallel": "wrapped in DistributedDataParallel",
    "FullyShardedDataParallel": "sharded by FSDP",
    "FSDPModule": "sharded by FSDP",
    "OptimizedModule": "compiled with torch.compile",
    "ScriptModule": "a TorchScript module",
}


def _refuse_wrapped(module: nn.Module) -> None:
    for submodule in module.modules():
        kinds = [_WRAPPERS.get(c.__name__) for c in type(submodule).__mro__ if c.__module__.startswith("torch.")]
        if getattr(submodule, "_compiled_call_impl", None) is not None:
            kinds.append("compiled with torch.compile")
        for kind in filter(None, kinds):
            raise SPMDError(
                f"{type(submodule).__name__} is {kind} and cannot be made data parallel a second time.",
                remedy="Pass the plain module: the compiled step averages, shards and compiles by itself.",
            )


def _refuse_unsupported_parameters(state: StepState) -> None:
    for param in state.params:
        value = param.value
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise SPMDError(f"Parameter {param.name} is not initialized.", remedy="Run the lazy module once first.")
        if type(value) not in (nn.Parameter, DTensor, torch.Tensor):
            raise SPMDError(
                f"Parameter {param.name} is of the class {type(value).__name__}. The DTensor that replaces it will not "
                "be.",
                remedy="Use nn.Parameter; to mark a parameter, set an attribute: weight.is_special = True.",
            )
        if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
            raise SPMDError(
                f"Parameter {param.name} has a gradient hook, but the data-parallel program does not run hooks.",
                remedy="Do the hook's work in the step, between backward() and optimizer.step().",
            )
    devices = {param.value.device for param in state.params}
    if len(devices) > 1:
        raise SPMDError(
            f"The parameters are on several devices: {sorted(map(str, devices))}.",
            remedy="Move the model to one device per rank.",
        )
    if not state.params:
        raise SPMDError("The module has no parameters.", remedy="Call the step without compiling it.")


def _refuse_foreign_parameters(state: StepState) -> None:
    for optimizer in state.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if state.index_of(param) is None:
                    raise SPMDError(
                        f"{type(optimizer).__name__} optimizes a parameter (number {position} of group {number}, shape "
                        f"{tuple(param.shape)}) that is in none of the modules passed to the step.",
                        remedy="Pass the module that owns it as well, or leave the parameter out of the optimizer.",
                    )
