"""Optimizers of sharded parameters: elementwise ones update the rank's rows, others the whole."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch.training import local_tensor, optimizer_has_hooks, outside_dynamo, version_of

from .agreement import Place
from .averaging import Averager
from .resting import Pair, Resting
from .row_gradient import Gather, RowGradient, gather_rows

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


class RowUpdates:
    """Puts the rank's rows into optimizers for the time of their steps, and gathers what they have updated."""

    def __init__(self, averager: Averager, resting: Resting) -> None:
        self.averager, self.resting = averager, resting
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # In a step of an optimizer: its parameters on rows.
        self._active: list[_OnRows] = []
        # The number of updates in this call.
        self.turn = 0

    def watch(self, optimizer: Optimizer) -> None:
        """Have the steps of an optimizer begin and end here."""
        if optimizer not in self._known:
            self._known.add(optimizer)
            optimizer.register_step_pre_hook(self._begin)
            optimizer.register_step_post_hook(self._end)

    @outside_dynamo
    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        pairs = self._sharded(optimizer)
        if not pairs:
            return None
        changed = _with_result_of_closure(args, kwargs)
        with torch.no_grad():
            self._prepare(optimizer, pairs)
        return changed

    def _prepare(self, optimizer: Optimizer, pairs: Sequence[Pair]) -> None:
        updated = [place for place, pair in enumerate(pairs) if pair.plain.grad is not None]
        meeting = self.averager.meeting
        meeting.watched = [pair.plain for pair in pairs]
        meeting.watched += [grad for pair in pairs if (grad := _plain_gradient(pair)) is not None]
        self.averager.gradients.meet(Place.UPDATE, self.turn, hash(tuple(updated)) % (1 << 62))
        self.turn += 1
        is_sparse = any(pair.plain.grad is not None and pair.plain.grad.is_sparse for pair in pairs)
        if why_whole(optimizer) is not None or is_sparse:
            self._make_whole(optimizer, pairs)
            return
        for pair in pairs:
            on_rows = _OnRows(pair, optimizer, self.resting)
            on_rows.enter()
            self._active.append(on_rows)

    @outside_dynamo
    @torch.no_grad()
    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        active, self._active = self._active, []
        gathers = []
        for on_rows in active:
            gathers += on_rows.leave()
        gather_rows(self.averager.meeting, gathers)
        if not active and why_whole(optimizer) is None:
            # It ran whole because of sparse gradients.
            self.rest_states(optimizer, is_entering=False)

    @torch.no_grad()
    def restore(self) -> None:
        """Let parameters be whole again, if an optimizer's step has raised an error."""
        self.turn = 0
        active, self._active = self._active, []
        for on_rows in active:
            on_rows.leave()

    @torch.no_grad()
    def rest_states(self, optimizer: Optimizer, is_entering: bool) -> None:
        """Let states that have an element for each of a parameter be DTensors between calls, as the parameter is."""
        whole = why_whole(optimizer) is not None
        for group in optimizer.param_groups:
            for pair in filter(None, (self.resting.pairs.get(id(param)) for param in group["params"])):
                values = optimizer.state.get(pair.plain) or {}
                for name, value in list(values.items()):
                    if not is_entering and not (whole and pair.rows is not None):
                        values[name] = self.resting.state_at_rest(pair, value)
                    elif is_entering and pair.rows is None and isinstance(value, DTensor):
                        values[name] = local_tensor(value)

    def _sharded(self, optimizer: Optimizer) -> list[Pair]:
        pairs = self.resting.pairs
        found = [pairs.get(id(param)) for group in optimizer.param_groups for param in group["params"]]
        return [pair for pair in found if pair is not None and pair.rows is not None]

    def _make_whole(self, optimizer: Optimizer, pairs: Sequence[Pair]) -> None:
        """Gather gradients and states, for an optimizer that is not elementwise."""
        gradients = self.averager.gradients
        if any(_plain_gradient(pair) is None and pair.plain.grad is not None for pair in pairs):
            gradients.read()
        make_states_whole(self.averager.meeting, optimizer, pairs)


def make_states_whole(meeting: Any, optimizer: Optimizer, pairs: Sequence[Pair]) -> None:
    """Gather the states of which ranks have rows."""
    gathers = []
    for pair in pairs:
        values = optimizer.state.get(pair.plain) or {}
        for name, value in values.items():
            if isinstance(value, DTensor) and pair.rows is not None:
                local = local_tensor(value)
                whole = torch.empty_strided(value.shape, value.stride(), dtype=local.dtype, device=local.device)
                gathers.append(Gather(pair.rows, local, whole))
                values[name] = whole
    gather_rows(meeting, gathers)


def _plain_gradient(pair: Pair) -> torch.Tensor | None:
    grad = pair.plain.grad
    return None if isinstance(grad, RowGradient) and grad.whole is None else grad


def _with_result_of_closure(args: Any, kwargs: Any) -> Any:
    """The arguments of a step, with the loss in place of the closure, which needs whole parameters."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    if len(args) > 1:
        return (args[0], lambda: loss, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: loss}


class _OnRows:
    """A parameter while its optimizer updates rows."""

    def __init__(self, pair: Pair, optimizer: Optimizer, resting: Resting) -> None:
        self.pair, self.optimizer, self.resting = pair, optimizer, resting
        self.whole: torch.Tensor = pair.plain.data
        self.grad = pair.plain.grad
        # The whole gradient, and its version before the step.
        self.whole_grad = _plain_gradient(pair)
        self.version = 0
        self.states: dict[str, DTensor] = {}

    def enter(self) -> None:
        """Let parameter, gradient and states be rows."""
        plain, rows = self.pair.plain, self.pair.rows
        assert rows is not None
        mine = None
        if self.whole_grad is not None:
            whole_grad = self.whole_grad.values() if isinstance(self.whole_grad, RowGradient) else self.whole_grad
            self.whole_grad, self.version = whole_grad, version_of(whole_grad)
            mine = rows.of(whole_grad)
        elif self.grad is not None:
            mine = self.grad.averaged
        plain.grad = None
        plain.data = rows.of(self.whole)
        plain.grad = mine
        values = self.optimizer.state.get(plain) or {}
        for name, value in list(values.items()):
            if not isinstance(value, DTensor) and self.whole.shape == getattr(value, "shape", ()) and value.dim():
                value = self.resting.state_of_rows(self.pair, rows.of(value).clone())
            if isinstance(value, DTensor):
                self.states[name] = value
                values[name] = local_tensor(value)

    def leave(self) -> list[Gather]:
        """Let them be whole again. Returns what is to be gathered."""
        plain, rows = self.pair.plain, self.pair.rows
        assert rows is not None
        shape = plain.shape
        plain.grad = None
        plain.data = self.whole
        plain.grad = self.grad
        values = self.optimizer.state.get(plain) or {}
        for name, value in list(values.items()):
            before = self.states.get(name)
            if before is not None and local_tensor(before) is value:
                values[name] = before
            elif isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                values[name] = self.resting.state_of_rows(self.pair, value)
        if self.grad is None:
            return []
        gathers = [Gather(rows, rows.of(self.whole).clone(), self.whole)]
        if self.whole_grad is not None and version_of(self.whole_grad) != self.version:
            # Some optimizers use it as a buffer.
            gathers.append(Gather(rows, rows.of(self.whole_grad).clone(), self.whole_grad))
        return gathers
