"""Optimizers of sharded parameters: elementwise ones update the rank's rows, others the whole."""

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_testing_ext._torch.tensors import pytrees
from torch_testing_ext._torch.training import (
    is_wrapped_by_scheduler,
    local_tensor,
    optimizer_has_hooks,
    outside_dynamo,
    version_of,
)

from .agreement import CallPlace
from .averaging import Averager
from .layout import Gather, gather_rows
from .resting import Resting, TwoForms
from .resting_tensor import RestingTensor

# Each element of their updates depends on that element alone.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adamax"]
)


def runs_on_rows(optimizer: Optimizer) -> bool:
    """Whether an optimizer may update rows. One with hooks, or with another step, may look at the whole."""
    step = optimizer.__dict__.get("step")
    return (
        type(optimizer) in _ELEMENTWISE
        and not optimizer_has_hooks(optimizer)
        and (step is None or is_wrapped_by_scheduler(step))
        and not any(group.get("differentiable") for group in optimizer.param_groups)
    )


class RowUpdates:
    """Puts the rank's rows into optimizers for the time of their steps, and gathers what they have updated."""

    def __init__(self, averager: Averager, resting: Resting) -> None:
        self.averager, self.resting = averager, resting
        # In a step of an optimizer: its parameters on rows.
        self._active: list[_OnRows] = []
        # The number of updates in this call.
        self.turn = 0

    def watch(self, optimizer: Optimizer) -> None:
        """Have the steps of an optimizer begin and end here."""
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    @outside_dynamo
    @torch.no_grad()
    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        pairs = self._sharded(optimizer)
        if not pairs:
            return
        updated = [place for place, pair in enumerate(pairs) if pair.plain.grad is not None]
        may_be_rows = runs_on_rows(optimizer)
        # An optimizer of whole parameters may keep the rank's own loss.
        held = self._states(optimizer) if may_be_rows else ()
        states = [(pair.name, name, _number(value), _writes(value)) for pair, _, name, value in held]
        number = zlib.crc32(repr((updated, _options(optimizer), states)).encode())
        self.meet(CallPlace.UPDATE, pairs, [optimizer], self.turn, number)
        self.turn += 1
        is_sparse = any(pair.plain.grad is not None and pair.plain.grad.is_sparse for pair in pairs)
        # A closure needs whole parameters.
        has_closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        if is_sparse or has_closure or not may_be_rows:
            for _, values, name, value in self._states(optimizer):
                if isinstance(value, DTensor):
                    values[name] = value.full_tensor()
            return
        for pair in pairs:
            on_rows = _OnRows(pair, optimizer, self.resting)
            on_rows.enter()
            self._active.append(on_rows)

    def meet(
        self,
        place: CallPlace,
        pairs: Sequence[TwoForms],
        optimizers: Sequence[Optimizer],
        turn: int = 0,
        updated: int = 0,
    ) -> None:
        """Meet the other ranks, and compare what all have whole."""
        self.averager.meeting.watched = [*self._alike(pairs, optimizers)]
        self.averager.meeting.meet(place, turn, updated=updated)

    def _alike(self, pairs: Sequence[TwoForms], optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
        """The tensors of which each rank keeps or updates its rows alone, where they are whole."""
        for pair in pairs:
            yield pair.plain
            if pair.plain.grad is not None:
                yield pair.plain.grad
        for optimizer in optimizers:
            on_rows = runs_on_rows(optimizer)
            for pair, _, _, value in self._states(optimizer):
                if on_rows and pair.rows is not None and pair.whole_state(value):
                    yield value

    @outside_dynamo
    @torch.no_grad()
    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        gather_rows(self.averager.meeting.group, self.restore())

    @torch.no_grad()
    def restore(self) -> list[Gather]:
        """Let parameters be whole again, also if an optimizer's step has raised an error. Returns what is to gather."""
        active, self._active = self._active, []
        return [gather for on_rows in active for gather in on_rows.leave()]

    def _states(self, optimizer: Optimizer) -> Iterator[tuple[TwoForms, dict[str, Any], str, Any]]:
        """The states of parameters that are DTensors between calls."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                pair = self.resting.pairs.get(id(param))
                values = {} if pair is None else optimizer.state.get(param) or {}
                for name, value in list(values.items()):
                    if pair is not None:
                        yield pair, values, name, value

    @torch.no_grad()
    def enter(self, optimizers: Iterable[Optimizer]) -> None:
        """Let states of replicated parameters be plain in a call. Those of others stay rows."""
        self.turn = 0
        for pair, values, name, value in itertools.chain.from_iterable(map(self._states, optimizers)):
            if isinstance(value, DTensor) and pair.rows is None:
                values[name] = pair.local_of(value)

    @torch.no_grad()
    def leave(self, optimizers: Iterable[Optimizer]) -> None:
        """Let states that have an element for each of a parameter be DTensors between calls, as the parameter is."""
        for optimizer in optimizers:
            on_rows = runs_on_rows(optimizer)
            for pair, values, name, value in self._states(optimizer):
                if pair.whole_state(value) and (pair.rows is None or on_rows):
                    mine = value if pair.rows is None else pair.rows.of(value).clone()
                    values[name] = self.resting.resting(pair, mine)

    def _sharded(self, optimizer: Optimizer) -> list[TwoForms]:
        pairs = self.resting.pairs
        found = [pairs.get(id(param)) for group in optimizer.param_groups for param in group["params"]]
        return [pair for pair in found if pair is not None and pair.rows is not None]


def _writes(value: Any) -> int:
    """The number of writes of the program to a state that each rank has rows of: a rank alone must not write."""
    return value.memory.writes if isinstance(value, RestingTensor) else 0


def _options(optimizer: Optimizer) -> list[Any]:
    """The numbers in an optimizer's options: by others, a rank would update its rows in another way."""
    leaves = pytrees.tree_leaves([{**group, "params": None} for group in optimizer.param_groups])
    return [_number(leaf) for leaf in leaves]


def _number(value: Any) -> Any:
    """A number, also that of a tensor on the CPU. None for anything else."""
    if isinstance(value, torch.Tensor) and value.is_cpu and not value.dim():
        return value.item()
    return value if isinstance(value, (bool, int, float)) else None


class _OnRows:
    """A parameter while its optimizer updates rows."""

    def __init__(self, pair: TwoForms, optimizer: Optimizer, resting: Resting) -> None:
        self.pair, self.optimizer, self.resting = pair, optimizer, resting
        self.whole: torch.Tensor = pair.plain.data
        # The gradient, and its version before the step.
        self.grad: torch.Tensor | None = pair.plain.grad
        self.version = 0 if self.grad is None else version_of(self.grad)
        # The states that were there before the step.
        self.held: dict[str, Any] = {}

    def enter(self) -> None:
        """Let parameter, gradient and states be rows."""
        plain, rows = self.pair.plain, self.pair.rows
        assert rows is not None
        values = self.optimizer.state.get(plain) or {}
        for name, value in list(values.items()):
            if self.pair.whole_state(value):
                value = self.resting.resting(self.pair, rows.of(value).clone())
            if isinstance(value, DTensor):
                values[name] = local = self.pair.local_of(value)
                is_ours = isinstance(value, RestingTensor) and local_tensor(value) is local
                self.held[name] = value if is_ours else self.resting.resting(self.pair, local)
        plain.grad = None
        plain.data = rows.of(self.whole)
        plain.grad = None if self.grad is None else rows.of(self.grad)

    def leave(self) -> list[Gather]:
        """Let them be whole again. Returns what is to be gathered."""
        plain, rows = self.pair.plain, self.pair.rows
        assert rows is not None
        shape = plain.shape
        plain.grad = None
        plain.data = self.whole
        plain.grad = self.grad
        gathers: list[Gather] = []
        values = self.optimizer.state.get(plain) or {}
        for name, value in list(values.items()):
            held = self.held.get(name)
            if held is not None and local_tensor(held) is value:
                held.memory.writes += 1
                values[name] = held
            elif isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                values[name] = self.resting.resting(self.pair, value)
        if self.grad is not None:
            gathers.append(Gather(rows, rows.of(self.whole), self.whole))
            if version_of(self.grad) != self.version:
                # Some optimizers use it as a buffer.
                gathers.append(Gather(rows, rows.of(self.grad), self.grad))
        return gathers
