"""The eager run of a step with DDP's semantics, on copies of all tensors: the reference for verification.

Modules and optimizers stay the same objects, as the step may have captured them. For the run they hold whole
parameters, states and buffers, and gradients are averaged over ranks at the end of each backward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import at_end_of_backward, tree

from ..trace.distribute import broadcast_, put_parameter
from ..trace.substitution import reinstated
from ..trace.train_state import StepState
from .snapshot import ModuleContents

_tree = tree()


class Predecessors:
    """The parameters that a model had before it was distributed. User code may still hold them, for example in a list.

    They are not kept alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    def add(self, old: torch.Tensor, new: torch.Tensor) -> None:
        if old is not new:
            self._known[id(new)] = weakref.ref(new), weakref.ref(old)

    def find(self, param: torch.Tensor) -> nn.Parameter | None:
        """The predecessor of a distributed parameter, if it is still alive."""
        new, old = self._known.get(id(param), (None, None))
        return old() if old is not None and new is not None and new() is param else None


class EagerCopy:
    """Copies of all tensors of a distributed step, whole, for an eager run. Creating it gathers shards."""

    def __init__(self, state: StepState, predecessors: Predecessors, group: dist.ProcessGroup | None) -> None:
        self.state, self.group = state, group
        self.params = [_eager_parameter(ref.value, predecessors.find(ref.value)) for ref in state.params]
        self.buffers = [ref.value.detach().clone() for ref in state.buffers]
        if group is not None:
            broadcast_(self.buffers, state.device, group)
        self.states: list[Any] = [defaultdict(dict) for _ in state.optimizers]
        for entry in state.optimizer_states():
            key = entry.key if entry.owner is None else self.params[entry.owner][0]
            leaves = [whole_copy(leaf) for leaf in entry.leaves]
            self.states[entry.optimizer][key] = _tree.tree_unflatten(leaves, entry.spec)
        self.index_of = {id(param): i for i, (param, _, _) in enumerate(self.params)}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put the copies into modules and optimizers, and average gradients; put everything back at the end."""
        with reinstated([param for param, _, _ in self.params]), self._installed():
            yield

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        state = self.state
        modules = ModuleContents(state.modules)
        optimizers = [(o, o.param_groups, o.state) for o in state.optimizers]
        params = [param for param, _, _ in self.params]
        held = [(param, param.data, param.grad, param.requires_grad) for param in params]
        handles: list[Any] = []
        try:
            for ref, (param, whole, grad) in zip(state.params, self.params, strict=True):
                param.requires_grad_(ref.value.requires_grad)
                param.data, param.grad = whole, grad
                for slot in ref.slots:
                    put_parameter(slot.module, slot.name, param)
            for buffer, copy in zip(state.buffers, self.buffers, strict=True):
                for slot in buffer.slots:
                    slot.module._buffers[slot.name] = copy
            for optimizer, states in zip(state.optimizers, self.states, strict=True):
                optimizer.param_groups = [
                    {**group, "params": [params[state.known_index(p)] for p in group["params"]]}
                    for group in optimizer.param_groups
                ]
                optimizer.state = states
            handles = [] if self.group is None else _averaging(params, self.group)
            yield
        finally:
            for handle in handles:
                handle.remove()
            modules.restore()
            for optimizer, groups, before in optimizers:
                optimizer.param_groups, optimizer.state = groups, before
            for param, data, grad, trainable in held:
                param.data, param.grad = data, grad
                param.requires_grad_(trainable)


def _eager_parameter(param: Any, predecessor: nn.Parameter | None) -> tuple[Any, Any, Any]:
    """The parameter for the eager run, its values, and its gradient."""
    whole = whole_copy(param.detach())
    grad = None if param.grad is None else whole_copy(param.grad)
    return predecessor if predecessor is not None else nn.Parameter(torch.empty_like(whole)), whole, grad


def whole_copy(value: Any) -> Any:
    """A copy of a tensor, whole if it is a DTensor; any other value itself."""
    if isinstance(value, DTensor):
        whole: torch.Tensor = value.full_tensor().detach().clone()
        return whole
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _averaging(params: list[nn.Parameter], group: dist.ProcessGroup) -> list[Any]:
    """Average gradients at the end of each backward, like DDP: those that any rank has accumulated in it."""
    touched: set[int] = set()

    def average() -> None:
        mask = torch.zeros(len(params), dtype=torch.int32, device=params[0].device)
        mask[sorted(touched)] = 1
        touched.clear()
        dist.all_reduce(mask, dist.ReduceOp.MAX, group=group)
        with torch.no_grad():
            for i in mask.nonzero().flatten().tolist():
                _average(params[i], group)

    def hook_of(i: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if not touched:
                at_end_of_backward(average)
            touched.add(i)

        return hook

    trainable: list[tuple[int, Any]] = [(i, param) for i, param in enumerate(params) if param.requires_grad]
    return [param.register_post_accumulate_grad_hook(hook_of(i)) for i, param in trainable]


def _average(param: nn.Parameter, group: dist.ProcessGroup) -> None:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
    mean = grad.mul(1 / group.size()).contiguous()
    dist.all_reduce(mean, group=group)
    if param.grad.is_sparse:
        param.grad = mean.to_sparse(param.grad.sparse_dim())
    else:
        param.grad.copy_(mean)
