"""Runs an elementwise optimizer of torch on the rank's rows of parameters, gradients and states."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch.spmd import (
    dtensor_like,
    local_tensor,
    optimizer_has_hooks,
    outside_dynamo,
    storage_key,
    version_of,
)

from .managed_params import ManagedParam, managed_by
from .read_watch import ReadWatch

# Each element of their updates depends on that element alone.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adamax"]
)


def why_whole(optimizer: Optimizer) -> str | None:
    """Why an optimizer must run on whole tensors; None if it may run on rows."""
    if type(optimizer) not in _ELEMENTWISE:
        return "it is none of torch's elementwise optimizers"
    if optimizer_has_hooks(optimizer):
        return "it has hooks, which see whole parameters"
    inner = optimizer.__dict__.get("step")
    if inner is not None and not hasattr(inner, "_wrapped_by_lr_sched"):
        return "its step has been replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "it is differentiable"
    return None


def rekey(optimizer: Optimizer, form: Callable[[Any], Any]) -> None:
    """Put another form of each parameter into an optimizer, in its groups and as keys of its state."""
    for group in optimizer.param_groups:
        group["params"][:] = [form(param) for param in group["params"]]
    items = [(form(key), value) for key, value in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(items)


class RowOptimizer:
    """Stands for `optimizer.step` in a call. Between updates the states are DTensors."""

    def __init__(
        self,
        optimizer: Optimizer,
        watch: ReadWatch,
        add_sums: Callable[[list[torch.Tensor]], None],
        after_update: Callable[[], None],
    ) -> None:
        self.optimizer, self.watch = optimizer, watch
        self._add_sums, self._after_update = add_sums, after_update
        self._had_own = "step" in optimizer.__dict__
        self._inner: Callable[..., Any] = optimizer.step
        self._active, self.ran_whole = False, False
        self._zero_grad: Callable[..., None] | None = None

    def install(self) -> None:
        """Replace the optimizer's step."""

        @outside_dynamo
        def step(closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            return self._step(closure, *args, **kwargs)

        if hasattr(self._inner, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True
        self._ours = step
        self._active = True
        self.optimizer.__dict__["step"] = step
        self._replace_zero_grad()

    def _replace_zero_grad(self) -> None:
        """Stop watching after `zero_grad`, which most often drops all that was watched."""
        if "zero_grad" in self.optimizer.__dict__:
            return
        inner = self.optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)
            if self._active:
                self.watch.rest()

        self._zero_grad = self.optimizer.__dict__["zero_grad"] = zero_grad

    def uninstall(self) -> None:
        """Restore the optimizer's step, unless something has wrapped ours meanwhile: then ours passes calls on."""
        self._active = False
        if self._zero_grad is not None and self.optimizer.__dict__.get("zero_grad") is self._zero_grad:
            del self.optimizer.__dict__["zero_grad"]
        if self.optimizer.__dict__.get("step") is self._ours:
            if self._had_own:
                self.optimizer.__dict__["step"] = self._inner
            else:
                del self.optimizer.__dict__["step"]

    def _step(self, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer on the rows of this rank."""
        if not self._active:
            return self._inner(*args, **kwargs) if closure is None else self._inner(closure, *args, **kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [managed_by(p) for group in self.optimizer.param_groups for p in group["params"]]
        sharded = [managed for managed in params if managed is not None and managed.sharded]
        with self.watch.pausing():
            is_sparse = any(_is_sparse(managed.plain.grad) for managed in sharded)
        if is_sparse:
            _ = [managed.plain.grad for managed in sharded]  # the watch gathers those of earlier calls
            self.watch.settle()
            self.ran_whole = True
            form = self._whole(sharded)
        else:
            form = self._rows(sharded)
        with self.watch.pausing(), form:
            result = self._inner(*args, **kwargs)
        self._after_update()
        return loss if closure is not None else result

    @contextmanager
    def _whole(self, sharded: list[ManagedParam]) -> Iterator[None]:
        """Let states be whole, for sparse gradients: rows of them would be dense, and mean something else."""
        make_states_whole(self.optimizer)
        yield
        shard_states(self.optimizer, sharded)

    @contextmanager
    def _rows(self, sharded: list[ManagedParam]) -> Iterator[None]:
        """Let parameters, gradients and states be the rank's rows."""
        rows = [_Rows(managed, self.optimizer) for managed in sharded]
        with torch.no_grad():
            wholes = [m.plain.detach() for m in sharded] + [m.plain.grad for m in sharded if m.plain.grad is not None]
            self._add_sums([whole for whole in wholes if storage_key(whole) not in self.watch.stale])
            for each in rows:
                each.enter()
        try:
            yield
        finally:
            with torch.no_grad():
                for each in rows:
                    for whole in each.leave():
                        self.watch.stale[storage_key(whole)] = each.managed, whole


class _Rows:
    """One parameter while its optimizer runs on rows."""

    def __init__(self, managed: ManagedParam, optimizer: Optimizer) -> None:
        self.managed, self.optimizer = managed, optimizer
        self.whole: torch.Tensor = managed.plain.data
        self._grad: torch.Tensor | None = None
        self._states: dict[str, DTensor] = {}
        self._had_gradient, self._version = False, 0

    def enter(self) -> None:
        plain, managed = self.managed.plain, self.managed
        self._grad = plain.grad
        rows = managed.kept
        if self._grad is not None:
            rows = managed.rows(self._grad)
            self._version = version_of(self._grad)
        plain.grad = None
        plain.data = managed.rows(self.whole)
        plain.grad = rows
        self._had_gradient = rows is not None
        values = self.optimizer.state.get(plain) or {}
        for name, value in list(values.items()):
            if isinstance(value, DTensor):
                self._states[name] = value
                values[name] = local_tensor(value)
            elif isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == self.whole.shape:
                values[name] = managed.layout.local_part(value.to_dense() if _is_sparse(value) else value)

    def leave(self) -> list[torch.Tensor]:
        """Return to the whole tensors. Returns those of which the rank's rows may have changed."""
        plain, rest = self.managed.plain, self.managed.rest
        shape = plain.shape
        plain.grad = None
        plain.data = self.whole
        plain.grad = self._grad
        values = self.optimizer.state.get(plain) or {}
        for name, value in list(values.items()):
            before = self._states.get(name)
            if before is not None and local_tensor(before) is value:
                values[name] = before
            elif isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                values[name] = dtensor_like(rest, value)
        changed = [self.whole] if self._had_gradient else []
        if self._grad is not None and version_of(self._grad) != self._version:
            changed.append(self._grad)  # some optimizers use it as a buffer
        return changed


def _is_sparse(grad: torch.Tensor | None) -> bool:
    return grad is not None and grad.layout is not torch.strided


def shard_states(optimizer: Optimizer, sharded: Iterable[ManagedParam]) -> None:
    """Keep the rank's rows of states that are whole."""
    for managed in sharded:
        values = optimizer.state.get(managed.plain) or optimizer.state.get(managed.rest) or {}
        for name, value in list(values.items()):
            is_whole = isinstance(value, torch.Tensor) and value.dim() and value.shape == managed.layout.shape
            if is_whole and not isinstance(value, DTensor) and not _is_sparse(value):
                values[name] = dtensor_like(managed.rest, managed.layout.local_part(value))


def make_states_whole(optimizer: Optimizer) -> None:
    """Gather states that are sharded."""
    for values in optimizer.state.values():
        if isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, DTensor):
                    values[name] = value.full_tensor()
