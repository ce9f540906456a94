"""Gradients and states of sharded parameters in a call: the rank's rows, until an operation uses them."""

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torch_testing_ext._torch.tensors import pytrees
from torch_testing_ext._torch.training import (
    MemoryReference,
    gather_into,
    holders_of_memory,
    is_in_backward,
    no_torch_function,
    version_of,
    wrapper_of,
)

from .agreement import CallPlace, StepMeeting
from .layout import Rows, as_real
from .modes import SPMDError


class Gather(NamedTuple):
    """The rows of this rank, and the whole tensor to fill with those of all ranks."""

    rows: Rows
    mine: torch.Tensor
    whole: torch.Tensor


# From this size on, rows travel alone, and without a copy.
_DIRECT_BYTES = 256 * 1024


@torch.no_grad()
def gather_rows(meeting: StepMeeting, gathers: Iterable[Gather]) -> None:
    """Fill whole tensors with the rows of all ranks."""
    together: dict[Any, list[Gather]] = {}
    works = []
    for gather in gathers:
        rows, mine, whole = gather.rows, as_real(gather.mine), as_real(gather.whole)
        if meeting.world == 1:
            whole.copy_(mine)
        elif rows.is_even and whole.is_contiguous() and whole.nbytes >= _DIRECT_BYTES:
            works.append(gather_into(whole.view(-1), mine.contiguous().view(-1), meeting.group))
        else:
            together.setdefault((whole.dtype, whole.device), []).append(Gather(rows, mine, whole))
    for alike in together.values():
        _gather_together(meeting, alike)
    for work in works:
        work.wait()


def _gather_together(meeting: StepMeeting, gathers: list[Gather]) -> None:
    """Gather tensors of one dtype and device in one collective."""
    widths = [gather.rows.width(gather.whole) for gather in gathers]
    mine = gathers[0].whole.new_zeros(sum(widths))
    for gather, part in zip(gathers, mine.split(widths), strict=True):  # type: ignore[no-untyped-call]
        part[: gather.mine.numel()].view(gather.mine.shape).copy_(gather.mine)
    parts = mine.new_empty(meeting.world, len(mine))
    gather_into(parts.view(-1), mine, meeting.group).wait()
    for gather, columns in zip(gathers, parts.split(widths, 1), strict=True):  # type: ignore[no-untyped-call]
        gather.rows.unpack(columns, gather.whole)


class RowTensor(torch.Tensor):
    """A gradient, or a state of an optimizer, of which this rank has the rows of a sharded parameter.

    An operation that uses it gathers it, and with it all of its kind, on every rank. From then on `whole` has the
    values, also for those that hold this object. Its attributes, such as the shape, need no values.
    """

    __torch_function__ = no_torch_function  # type: ignore[assignment]
    owner: "RowTensors"
    param: "weakref.ref[torch.Tensor]"
    rows: Rows
    # This rank's rows. None while they are on their way.
    mine: torch.Tensor | None
    # What this rank has accumulated of a gradient since.
    local: torch.Tensor | None
    whole: torch.Tensor | None
    # The memory of the whole gradient in an earlier call.
    memory: MemoryReference | None
    # Of a state: what the optimizer has between calls, if it is no new one.
    rest: Any

    @staticmethod
    def __new__(cls, owner: "RowTensors", param: torch.Tensor, rows: Rows, mine: torch.Tensor | None) -> Any:
        held = wrapper_of(cls, param)
        held.owner, held.param, held.rows, held.mine = owner, weakref.ref(param), rows, mine
        held.local = held.whole = held.memory = held.rest = None
        return held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with the whole tensor, unless autograd accumulates a gradient."""
        if func is torch.ops.aten.add_.Tensor and is_in_backward() and _can_wait(*args):
            target, more = args
            target.local = more if target.local is None else target.local + more
            return target
        args, kwargs = pytrees.tree_map_only(RowTensor, RowTensor.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def values(self) -> torch.Tensor:
        """The whole tensor, gathered if it is not yet."""
        if self.whole is None:
            self.owner.read()
        if self.whole is None:
            raise SPMDError(
                "A gradient or a state of an earlier call is used, of which each rank has rows.",
                remedy="Use it in the step, or return the value that you want to know.",
            )
        return self.whole

    def current_rows(self) -> torch.Tensor | None:
        """This rank's rows, with what has been written to the whole tensor."""
        if self.whole is not None and self.mine is not None:
            self.mine.copy_(self.rows.of(self.whole))
        return self.mine

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(self.values())

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.values(), memo)


def _read(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self.values(), name)(*args, **kwargs)


for _name in ("numpy", "tolist", "data_ptr", "untyped_storage", "__reduce_ex__"):
    # Reads of values that are no operations.
    setattr(RowTensor, _name, _read(_name))


def _can_wait(target: Any, more: Any) -> bool:
    if not isinstance(target, RowTensor) or isinstance(more, RowTensor):
        return False
    # A single rank sends nothing at the end of a backward: what waits would be lost.
    return target.whole is None and target.rows.world > 1


def is_kept(grad: torch.Tensor | None) -> bool:
    """Whether a gradient has to stay whole: it is sparse, or something besides autograd has made it and may keep it."""
    if grad is None or isinstance(grad, RowTensor):
        return False
    return grad.layout is not torch.strided or version_of(grad) > 0 or holders_of_memory(grad) > 1


class RowTensors:
    """The gradients, or the states, of a call of which each rank has rows."""

    def __init__(self, meeting: StepMeeting) -> None:
        self.meeting = meeting
        # In the order in which they got their rows, which is the same on all ranks.
        self._references: list[weakref.ref[RowTensor]] = []
        # Whether something has read them in this call.
        self.are_read = False

    def begin(self) -> None:
        """Begin a call."""
        self._references, self.are_read = [], False

    def _alive(self) -> Iterator[RowTensor]:
        for reference in self._references:
            held = reference()
            if held is not None and held.whole is None:
                yield held

    def hold(self, param: torch.Tensor, rows: Rows, mine: torch.Tensor | None) -> RowTensor:
        """A tensor of the shape of a parameter, of which this rank has these rows."""
        held: RowTensor = RowTensor(self, param, rows, mine)
        if mine is not None:
            self._references.append(weakref.ref(held))
        return held

    def take(self, param: torch.Tensor, rows: Rows) -> tuple[RowTensor | None, torch.Tensor | None]:
        """Take from a parameter what this rank has accumulated. Returns also the gradient that is to get the mean."""
        grad: Any = param.grad
        if grad is None or is_kept(grad):
            return None, None
        if isinstance(grad, RowTensor) and grad.whole is None:
            taken, grad.local = grad.local, None
            return grad, taken
        gradient = param.grad = self.hold(param, rows, None)
        return gradient, grad

    def give(self, param: torch.Tensor, rows: Rows, mean: torch.Tensor, gradient: RowTensor | None) -> None:
        """Add rows of a mean to the gradient of a parameter, which `take` has returned."""
        if gradient is None:
            self.add(param, rows, mean)
        elif gradient.mine is None:
            gradient.mine = mean
            self._references.append(weakref.ref(gradient))
        else:
            gradient.mine = gradient.mine + mean

    def add(self, param: torch.Tensor, rows: Rows, mean: torch.Tensor) -> None:
        """Add rows of a mean to the gradient of a parameter that `take` has found without one."""
        grad: Any = param.grad
        if isinstance(grad, RowTensor) and grad.whole is None:
            self.give(param, rows, mean, grad)
        elif not is_kept(grad):
            param.grad = gradient = self.hold(param, rows, mean)
            gradient.local = grad

    def about(self) -> int:
        """A hash of the tensors of which ranks have rows."""
        shapes = [tuple(held.shape) for held in self._alive()]
        return hash(tuple(shapes)) % (1 << 62) if shapes else 0

    def read(self) -> None:
        """Gather, because an operation of this rank uses one."""
        if self.meeting.step >= 0:
            self.meeting.meet(CallPlace.READ, about=self.about())
            self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Gather, because all ranks do."""
        self.are_read = True
        waiting = list(self._alive())
        gathers = []
        for held in waiting:
            kind = held.shape, held.stride(), held.dtype
            whole = None if held.memory is None else held.memory.tensor(*kind)
            if whole is None:
                whole = torch.empty_strided(kind[0], kind[1], dtype=kind[2], device=held.device)
            assert held.mine is not None
            gathers.append(Gather(held.rows, held.mine, whole))
        gather_rows(self.meeting, gathers)
        for held, gather in zip(waiting, gathers, strict=True):
            whole, param = gather.whole, held.param()
            if held.local is not None:
                whole += held.local
            held.whole, held.local = whole, None
            if param is not None and param.grad is held:
                param.grad = whole
        self._references = []
