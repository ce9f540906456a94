"""The gradient of a sharded parameter in a call: the rank's rows of the mean, until an operation uses it."""

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torch_testing_ext._torch.training import gather_into, is_in_backward, no_torch_function, tree, wrapper_of

from .agreement import Meeting, Place
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
def gather_rows(meeting: Meeting, gathers: Iterable[Gather]) -> None:
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


def _gather_together(meeting: Meeting, gathers: list[Gather]) -> None:
    """Gather tensors of one dtype and device in one collective."""
    widths = [gather.rows.width(gather.whole) for gather in gathers]
    mine = gathers[0].whole.new_zeros(sum(widths))
    for gather, part in zip(gathers, mine.split(widths), strict=True):  # type: ignore[no-untyped-call]
        part[: gather.mine.numel()].view(gather.mine.shape).copy_(gather.mine)
    parts = mine.new_empty(meeting.world, len(mine))
    gather_into(parts.view(-1), mine, meeting.group).wait()
    for gather, columns in zip(gathers, parts.split(widths, 1), strict=True):  # type: ignore[no-untyped-call]
        gather.rows.unpack(columns, gather.whole)


class RowGradient(torch.Tensor):
    """The gradient of a sharded parameter, of which this rank has its rows.

    An operation that uses it gathers it, and with it those of all parameters, on every rank. From then on `whole` is
    the gradient, also for those that hold this object. Its attributes, such as the shape, need no values.
    """

    __torch_function__ = no_torch_function  # type: ignore[assignment]
    owner: "RowGradients"
    param: "weakref.ref[torch.Tensor]"
    rows: Rows
    # The rank's rows of the mean.
    averaged: torch.Tensor
    # What this rank has accumulated since.
    local: torch.Tensor | None
    whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, owner: "RowGradients", param: torch.Tensor, rows: Rows, mean: torch.Tensor) -> Any:
        gradient = wrapper_of(cls, param)
        gradient.owner, gradient.param, gradient.rows, gradient.averaged = owner, weakref.ref(param), rows, mean
        gradient.local = gradient.whole = None
        return gradient

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with the whole gradient, unless autograd accumulates."""
        if func is torch.ops.aten.add_.Tensor and is_in_backward() and _can_wait(*args):
            target, more = args
            target.local = more if target.local is None else target.local + more
            return target
        args, kwargs = tree().tree_map_only(RowGradient, RowGradient.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def values(self) -> torch.Tensor:
        """The whole gradient, gathered if it is not yet."""
        if self.whole is None:
            self.owner.read()
        if self.whole is None:
            raise SPMDError(
                "A gradient of an earlier call is used, of which each rank has rows.",
                remedy="Use it in the step, or return the value that you want to know.",
            )
        return self.whole

    # What torch reads without an operation.

    def numpy(self, *, force: bool = False) -> Any:
        return self.values().numpy(force=force)

    def tolist(self) -> Any:
        return self.values().tolist()

    def data_ptr(self) -> int:
        return self.values().data_ptr()

    def untyped_storage(self) -> Any:
        return self.values().untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(self.values())

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.values(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _can_wait(target: Any, more: Any) -> bool:
    return isinstance(target, RowGradient) and target.whole is None and not isinstance(more, RowGradient)


class RowGradients:
    """The gradients of a call of which each rank has rows."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        # In the order in which they were made, which is the same on all ranks.
        self._references: list[weakref.ref[RowGradient]] = []
        # Whether something has read them in this call.
        self.are_read = False

    def begin(self) -> None:
        """Begin a call."""
        self._references, self.are_read = [], False

    def _alive(self) -> Iterator[RowGradient]:
        for reference in self._references:
            gradient = reference()
            if gradient is not None and gradient.whole is None:
                yield gradient

    def add(self, param: torch.Tensor, rows: Rows, mean: torch.Tensor) -> None:
        """Add rows of a mean to the gradient of a parameter."""
        grad: Any = param.grad
        if isinstance(grad, RowGradient) and grad.whole is None:
            grad.averaged = grad.averaged + mean
            return
        gradient = RowGradient(self, param, rows, mean)
        gradient.local = grad
        param.grad = gradient
        self._references.append(weakref.ref(gradient))

    def about(self) -> int:
        """A hash of the gradients of which ranks have rows."""
        shapes = [tuple(gradient.shape) for gradient in self._alive()]
        return hash(tuple(shapes)) % (1 << 62) if shapes else 0

    def read(self) -> None:
        """Gather, because an operation of this rank uses one."""
        if self.meeting.step >= 0:
            self.meeting.meet(Place.READ, about=self.about())
            self._gather()

    def meet(self, place: Place, turn: int = 0, updated: int = 0) -> None:
        """Send a header and wait for those of the others. If another rank reads gradients, give it the rows."""
        while self.meeting.meet(place, turn, self.about(), updated):
            self._gather()

    @torch.no_grad()
    def _gather(self) -> None:
        self.are_read = True
        gradients = list(self._alive())
        gathers = []
        for gradient in gradients:
            whole = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device=gradient.device)
            gathers.append(Gather(gradient.rows, gradient.averaged, whole))
        gather_rows(self.meeting, gathers)
        for gradient, gather in zip(gradients, gathers, strict=True):
            whole, param = gather.whole, gradient.param()
            if gradient.local is not None:
                whole += gradient.local
            gradient.whole, gradient.local = whole, None
            if param is not None and param.grad is gradient:
                param.grad = whole
        self._references = []
