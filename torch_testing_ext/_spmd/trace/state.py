"""What a train step works on besides its inputs: parameters, buffers, gradients, optimizer states.

Collecting reads modules and optimizers and refuses what cannot be made data parallel; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch import tree

from ..errors import SPMDError

_tree = tree()


@dataclass
class Slot:
    """One place in a module where a tensor is registered."""

    module: nn.Module
    name: str


@dataclass
class TensorRef:
    """A parameter or buffer: one tensor, however many slots hold it (tied weights stay one)."""

    name: str
    value: torch.Tensor
    slots: list[Slot] = field(default_factory=list)


@dataclass
class StateEntry:
    """What an optimizer keeps under one key of its state, flattened."""

    optimizer: int
    owner: int | None  # index of the parameter, or None where the key is no parameter
    key: Any
    value: Any
    leaves: list[Any]
    names: list[str]
    spec: Any

    @property
    def structure(self) -> tuple[Any, ...]:
        """What the traced program may depend on: all but the numbers inside the tensors."""
        leaves = tuple(_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves)
        return (self.optimizer, self.owner if self.owner is not None else self.key, self.spec, leaves)


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device, isinstance(tensor, DTensor)


@dataclass
class StepState:
    modules: list[nn.Module]  # every submodule, once
    module_names: list[str]
    params: list[TensorRef]
    buffers: list[TensorRef]
    optimizers: list[Optimizer]

    def index_of(self, param: torch.Tensor) -> int | None:
        return self._by_id.get(id(param))

    def known_index(self, param: torch.Tensor) -> int:
        return self._by_id[id(param)]

    def reindex(self) -> None:
        self._by_id = {id(held.value): i for i, held in enumerate(self.params)}

    def __post_init__(self) -> None:
        self.reindex()

    def optimizer_states(self) -> list[StateEntry]:
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


def collect(leaves: list[Any]) -> StepState:
    """Modules and optimizers among the step's arguments, with all they hold."""
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
        _held(submodules, "_parameters"),
        _held(submodules, "_buffers"),
        optimizers,
    )
    _refuse_odd_parameters(state)
    _refuse_strangers(state)
    return state


def _unique(values: Iterator[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def _held(modules: dict[nn.Module, str], registry: str) -> list[TensorRef]:
    found: dict[int, TensorRef] = {}
    for module, prefix in modules.items():
        for name, value in getattr(module, registry).items():
            if value is not None:
                held = found.setdefault(id(value), TensorRef(f"{prefix}.{name}" if prefix else name, value))
                held.slots.append(Slot(module, name))
    return list(found.values())


# Told by name: importing the FSDP packages only to ask would cost every rank half a second.
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
                f"{type(submodule).__name__} is {kind}; it cannot be made data parallel a second time.",
                remedy="Pass the plain module: the compiled step does the averaging, sharding and compiling itself.",
            )


def _refuse_odd_parameters(state: StepState) -> None:
    for param in state.params:
        value = param.value
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise SPMDError(f"Parameter {param.name} is not initialized.", remedy="Run the lazy module once before.")
        if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
            raise SPMDError(
                f"Parameter {param.name} has a gradient hook, which the data-parallel program would not run.",
                remedy="Do in the step, between backward() and optimizer.step(), what the hook does.",
            )
    devices = {param.value.device for param in state.params}
    if len(devices) > 1:
        raise SPMDError(
            f"The parameters are on several devices: {sorted(map(str, devices))}.",
            remedy="Move the model to one device per rank.",
        )
    if not state.params:
        raise SPMDError("The module has no parameters.", remedy="Run a step without parameters as it is.")


def _refuse_strangers(state: StepState) -> None:
    for optimizer in state.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if state.index_of(param) is None:
                    raise SPMDError(
                        f"{type(optimizer).__name__} optimizes a parameter (number {position} of group {number}, shape "
                        f"{tuple(param.shape)}) that is in none of the modules passed to the step.",
                        remedy="Pass the module that owns it as well, or leave the parameter out of the optimizer.",
                    )
