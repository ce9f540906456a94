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
from .resting import Resting, TwoForms
from .resting_tensor import RestingTensor
from .row_tensor import Gather, RowTensor, RowTensors, gather_rows

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
        # The states of optimizers in a call.
        self.states = RowTensors(averager.meeting)
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
        states = [(pair.name, name, _number(value)) for pair, _, name, value in held]
        number = zlib.crc32(repr((updated, _options(optimizer), states)).encode())
        self.meet(CallPlace.UPDATE, pairs, [optimizer], self.turn, number)
        self.turn += 1
        is_sparse = any(pair.plain.grad is not None and pair.plain.grad.is_sparse for pair in pairs)
        # A closure needs whole parameters.
        has_closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        if is_sparse or has_closure or not may_be_rows:
            self._make_whole(optimizer, pairs)
            return
        for pair in pairs:
            on_rows = _OnRows(pair, optimizer, self.states)
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
        """Meet the other ranks, and compare what all have whole. Others that read gradients get this rank's rows."""
        meeting, gradients = self.averager.meeting, self.averager.gradients
        meeting.watched = [*self._alike(pairs, optimizers)]
        while meeting.meet(place, turn, gradients.about(), updated):
            gradients.gather()
            meeting.watched = [*self._alike(pairs, optimizers)]

    def _alike(self, pairs: Sequence[TwoForms], optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
        """The tensors of which each rank keeps or updates its rows alone, where they are whole."""
        for pair in pairs:
            yield pair.plain
            grad = _plain_gradient(pair)
            if grad is not None:
                yield grad.values() if isinstance(grad, RowTensor) else grad
        for optimizer in optimizers:
            on_rows = runs_on_rows(optimizer)
            for pair, _, _, value in self._states(optimizer):
                if isinstance(value, RowTensor):
                    if value.whole is not None:
                        yield value.whole
                elif on_rows and pair.rows is not None and pair.whole_state(value):
                    yield value

    @outside_dynamo
    @torch.no_grad()
    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        gather_rows(self.averager.meeting, self.restore())

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
        """Let states be plain in a call: whole ones, or rows that are gathered when the step uses them."""
        self.states.begin()
        self.turn = 0
        for pair, values, name, value in itertools.chain.from_iterable(map(self._states, optimizers)):
            if isinstance(value, DTensor):
                values[name] = local = pair.local_of(value)
                if pair.rows is not None:
                    values[name] = held = self.states.hold(pair.plain, pair.rows, local)
                    held.rest = value if isinstance(value, RestingTensor) else None

    @torch.no_grad()
    def leave(self, optimizers: Iterable[Optimizer]) -> None:
        """Let states that have an element for each of a parameter be DTensors between calls, as the parameter is."""
        for optimizer in optimizers:
            on_rows = runs_on_rows(optimizer)
            for pair, values, name, value in self._states(optimizer):
                if isinstance(value, RowTensor):
                    mine = value.current_rows()
                    assert mine is not None
                    if value.rest is not None and local_tensor(value.rest) is mine:
                        value.rest.memory.writes += 1
                        values[name] = value.rest
                    else:
                        values[name] = self.resting.resting(pair, mine)
                elif pair.whole_state(value) and (pair.rows is None or on_rows):
                    mine = value if pair.rows is None else pair.rows.of(value).clone()
                    values[name] = self.resting.resting(pair, mine)

    def _sharded(self, optimizer: Optimizer) -> list[TwoForms]:
        pairs = self.resting.pairs
        found = [pairs.get(id(param)) for group in optimizer.param_groups for param in group["params"]]
        return [pair for pair in found if pair is not None and pair.rows is not None]

    def _make_whole(self, optimizer: Optimizer, pairs: Sequence[TwoForms]) -> None:
        """Gather gradients and states, for an optimizer that is not elementwise."""
        gradients = self.averager.gradients
        if any(_plain_gradient(pair) is None and pair.plain.grad is not None for pair in pairs):
            gradients.read()
        for _, values, name, value in self._states(optimizer):
            if isinstance(value, RowTensor):
                values[name] = value.values()


def _options(optimizer: Optimizer) -> list[Any]:
    """The numbers in an optimizer's options: by others, a rank would update its rows in another way."""
    leaves = pytrees.tree_leaves([{**group, "params": None} for group in optimizer.param_groups])
    return [_number(leaf) for leaf in leaves]


def _number(value: Any) -> Any:
    """A number, also that of a tensor on the CPU. None for anything else."""
    if isinstance(value, torch.Tensor) and value.is_cpu and not value.dim():
        return value.item()
    return value if isinstance(value, (bool, int, float)) else None


def _plain_gradient(pair: TwoForms) -> torch.Tensor | None:
    grad = pair.plain.grad
    return None if isinstance(grad, RowTensor) and grad.whole is None else grad


class _OnRows:
    """A parameter while its optimizer updates rows."""

    def __init__(self, pair: TwoForms, optimizer: Optimizer, states: RowTensors) -> None:
        self.pair, self.optimizer, self.states = pair, optimizer, states
        self.whole: torch.Tensor = pair.plain.data
        self.grad = pair.plain.grad
        # The whole gradient, and its version before the step.
        self.whole_grad = _plain_gradient(pair)
        self.version = 0
        # The states that were there before the step.
        self.held: dict[str, RowTensor] = {}

    def enter(self) -> None:
        """Let parameter, gradient and states be rows."""
        plain, rows = self.pair.plain, self.pair.rows
        assert rows is not None
        mine = None
        if self.whole_grad is not None:
            if isinstance(self.whole_grad, RowTensor):
                self.whole_grad = self.whole_grad.values()
            self.version = version_of(self.whole_grad)
            mine = rows.of(self.whole_grad)
        elif self.grad is not None:
            mine = self.grad.mine
        values = self.optimizer.state.get(plain) or {}
        for name, value in list(values.items()):
            if self.pair.whole_state(value):
                value = self.states.hold(plain, rows, rows.of(value).clone())
            if isinstance(value, RowTensor):
                self.held[name] = value
                values[name] = value.current_rows()
        plain.grad = None
        plain.data = rows.of(self.whole)
        plain.grad = mine

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
            if held is not None and held.mine is not None and held.mine is value:
                values[name] = held
                if held.whole is not None:
                    gathers.append(Gather(rows, held.mine, held.whole))
            elif isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                values[name] = self.states.hold(plain, rows, value)
        if self.grad is not None:
            gathers.append(Gather(rows, rows.of(self.whole), self.whole))
        if self.whole_grad is not None and version_of(self.whole_grad) != self.version:
            # Some optimizers use it as a buffer.
            gathers.append(Gather(rows, rows.of(self.whole_grad), self.whole_grad))
        return gathers
