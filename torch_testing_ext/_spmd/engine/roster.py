"""The roster: all parameters, buffers and optimizers of one call, in an order that is the same on every rank."""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .gradient_buckets import BackwardPlan, BucketStore
from .managed_params import ManagedParam, managed_by

READS_KEPT, READS_UPDATED = 1, 2
# The number of first calls of a step in which mistakes, and what it reads, are looked for.
EARLY = 8


class ParamSlot(NamedTuple):
    """A place in a module where a parameter is registered."""

    module: nn.Module
    name: str
    value: torch.Tensor


def registered(roots: Iterable[nn.Module]) -> tuple[list[ParamSlot], list[torch.Tensor]]:
    """The slots of all parameters of some modules, and their buffers, each once.

    DDP wraps no module without parameters, such as a metric: its buffers are the rank's own.
    """
    roots = [root for root in roots if next(root.parameters(), None) is not None]
    slots: list[ParamSlot] = []
    buffers: dict[int, torch.Tensor] = {}
    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        for name, value in module._parameters.items():
            if value is not None:
                slots.append(ParamSlot(module, name, value))
        for buffer in module._buffers.values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
    return slots, [*buffers.values()]


def tensors_of(slots: Iterable[ParamSlot], optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """All parameters, each once: those in slots, then those that only optimizers hold."""
    tensors = {id(slot.value): slot.value for slot in slots}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                # It holds the plain ones if no call has had it.
                managed = managed_by(param)
                tensor = param if managed is None else managed.rest
                tensors.setdefault(id(tensor), tensor)
    return [*tensors.values()]


def slot_names(roots: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The name of each parameter and buffer, in the words of `named_parameters`."""
    several = [*roots]
    for number, root in enumerate(several):
        prefix = "" if len(several) == 1 else f"{type(root).__name__}#{number}"
        yield from root.named_parameters(prefix)
        yield from root.named_buffers(prefix)


@dataclass
class Roster:
    """The state that a step found in a call. The next call of the step uses it again, if it finds the same."""

    params: list[ManagedParam]
    # As they were found: they keep the identities valid.
    tensors: list[torch.Tensor]
    optimizers: list[Optimizer]
    store: BucketStore
    # That all ranks get from rank 0.
    buffers: list[torch.Tensor]
    calls: int = 0
    # The bytes of buffers that all ranks got from rank 0 in the last call.
    shared: int = 0
    # Ran whole in the last call, for sparse gradients.
    sparse: list[Optimizer] = field(default_factory=list)
    # Bits: the step reads gradients of earlier calls, parameters after their update.
    reads: int = 0
    # Of whole values in the last call.
    sums: list[torch.Tensor] = field(default_factory=list)
    plans: dict[str, list[BackwardPlan | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The model holds DTensors between calls.
        self.rests = any(managed.rests_as_dtensor for managed in self.params)
        self.shards = any(managed.sharded for managed in self.params)
        # Something is sent before the first bucket.
        self.opens_with_header = self.rests or bool(self.buffers)
        self.plains = {id(managed.plain) for managed in self.params}
        self._kinds = _kinds(self.tensors)

    def is_eager(self, kind: int) -> bool:
        """Is this kind gathered at once? The first calls show if a rank reads it."""
        return bool(self.reads & kind) or self.calls < EARLY

    def take_sums(self) -> list[torch.Tensor]:
        """The checksums of the last call, once: an error that they cause is raised once."""
        sums, self.sums = self.sums, []
        return sums

    def matches(self, tensors: list[torch.Tensor], optimizers: list[Optimizer]) -> bool:
        same = _same(self.tensors, tensors) and _same(self.optimizers, optimizers)
        return same and self._kinds == _kinds(tensors)

    def plan_of(self, phase: str, turn: int) -> BackwardPlan | None:
        """The plan of the backward number `turn` of a phase, if the last call had one."""
        plans = self.plans.get(phase, ())
        return plans[turn] if turn < len(plans) else None

    @property
    def opening(self) -> BackwardPlan | None:
        """The plan of the first backward, if its first bucket opens a call."""
        return None if self.opens_with_header else self.plan_of("inside", 0)

    def remember(self, phase: str, turn: int, plan: BackwardPlan | None) -> None:
        plans = self.plans.setdefault(phase, [])
        plans += [None] * (turn + 1 - len(plans))
        plans[turn] = plan

    def forget_after(self, phase: str, turns: int) -> None:
        del self.plans.setdefault(phase, [])[turns:]


def _kinds(tensors: list[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """The kinds of plain parameters, by which buckets were made; DTensors keep theirs between calls."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors if not isinstance(tensor, DTensor)]


def _same(known: list[torch.Tensor] | list[Optimizer], now: list[torch.Tensor] | list[Optimizer]) -> bool:
    return len(known) == len(now) and all(map(operator.is_, known, now))
