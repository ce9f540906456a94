"""Substitution: a step that reaches a tensor of the model in its own way gets the same fake as the model's modules.

Modules and optimizers hold fakes during a trace, but a list of parameters that was made earlier holds the real ones.
Every use of such a tensor passes through a mode, which puts the fake in its place.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from torch_testing_ext._torch.spmd import disable_torch_function, is_fake, storage_key, without_dispatch

from ..spmd_errors import SPMDError, user_line

_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}


_READ_VALUES: set[Any] = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__bool__,
    torch.Tensor.__index__,
    torch.Tensor.__complex__,
    torch.Tensor.__repr__,
    torch.Tensor.__format__,
    torch.Tensor.__contains__,
    torch.equal,
    torch.is_nonzero,
    torch.Tensor.is_nonzero,
    torch.Tensor.equal,
}


_ARRAYS: set[Any] = {torch.Tensor.numpy, torch.Tensor.__array__}
_OF_ZERO_GRAD = {inspect.getfile(Optimizer), inspect.getfile(nn.Module)}


class Superseded(nn.Parameter):
    """A parameter that a DTensor has replaced. It would stay as it is for ever, so every use of it is an error."""

    successor: torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_description(func):
            with disable_torch_function():
                return func(*args, **(kwargs or {}))
        raise SPMDError(
            "This parameter was replaced by a DTensor when a compiled step first ran, and is no longer the model's.",
            remedy="Take the parameters from the model again: model.parameters().",
            where=user_line(),
        )


_DESCRIPTIONS = {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__hash__, torch.Tensor.stride}
_DESCRIBING_PROPERTIES = {"shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "layout"}


def _is_description(func: Any) -> bool:
    return func in _DESCRIPTIONS or _property_of(func, "__get__") in _DESCRIBING_PROPERTIES


def _property_of(func: Any, access: str) -> str | None:
    """The name of the property if `func` is its getter ("__get__") or setter ("__set__")."""
    if getattr(func, "__name__", "") != access:
        return None
    name: str | None = getattr(func.__self__, "__name__", None)
    return name


_successors: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def successor_of_id(number: int) -> torch.Tensor | None:
    """The parameter that replaced the one whose id was `number`, if any."""
    return _successors.get(number)


def supersede(old: torch.Tensor, new: torch.Tensor) -> None:
    """Mark `old`, a plain parameter, as replaced by `new`."""
    _successors[id(old)] = new
    if type(old) is nn.Parameter:
        old.__class__ = Superseded
        old.successor = new  # type: ignore[attr-defined]


def reinstate(old: torch.Tensor) -> None:
    """Make a parameter usable again after `supersede`."""
    if type(old) is Superseded:
        old.__class__ = nn.Parameter  # type: ignore[assignment]


@contextlib.contextmanager
def reinstated(params: list[Any]) -> Iterator[None]:
    """Make those of `params` that were superseded usable in this context."""
    superseded = [param for param in params if type(param) is Superseded]
    for param in superseded:
        reinstate(param)
    try:
        yield
    finally:
        for param in superseded:
            param.__class__ = Superseded


class Substitution(TorchFunctionMode):
    """Puts fakes in place of real tensors, and refuses changes of a parameter that a program cannot repeat.

    fakes: the fake of each real tensor, by the id of the real one; params: the fakes of the model's parameters;
    replaced: real gradients and states, which later calls may replace by other tensors.
    """

    def __init__(
        self, fakes: dict[int, torch.Tensor], params: list[torch.Tensor], replaced: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self.fakes = fakes
        self.replaced = {id(tensor): tensor for tensor in replaced}
        self.params = {id(param): i for i, param in enumerate(params)}
        self.entry_grads = {id(param.grad) for param in params if param.grad is not None}
        self.seen_grads: set[int] = set()  # the parameters whose gradient on entry the step looked at
        self.read_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # real tensors, with a copy of the values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._substituted(args), self._substituted(kwargs or {})
        if _property_of(func, "__set__") == "data":
            _refuse_other_data(*args)
            return None
        if func in _HOOKS and id(args[0]) in self.params:
            raise SPMDError(
                "The step registers a hook on a parameter, but the data-parallel program does not run hooks.",
                remedy="Do the hook's work in the step, between backward() and optimizer.step().",
                where=user_line(),
            )
        if func in _READ_VALUES and not is_fake(args[0]):
            with disable_torch_function(), without_dispatch():
                self.read_values.setdefault(id(args[0]), (args[0], args[0].detach().clone()))
                if func in _ARRAYS:  # under a tracer, the array would not have the values
                    return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if id(result) in self.entry_grads and _property_of(func, "__get__") == "grad" and not _is_removal():
            self.seen_grads.add(self.params[id(args[0])])
        return result

    def _substituted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) is Superseded:
                value = value.successor
            if id(value) in self.replaced:
                _refuse_captured(value)
            return self.fakes.get(id(value), value)
        kind = type(value)
        if kind is dict:
            return {key: self._substituted(item) for key, item in value.items()}
        if kind is tuple or kind is list:
            return kind(map(self._substituted, value))
        return value


def _refuse_captured(tensor: torch.Tensor) -> None:
    with disable_torch_function():
        shape = tuple(tensor.shape)
    raise SPMDError(
        f"The step uses a gradient or an optimizer's state of shape {shape} that it captured from outside. Later calls "
        "may replace it by another tensor.",
        remedy="Get it in the step: p.grad, optimizer.state[p].",
        where=user_line(),
    )


def _is_removal() -> bool:
    """Whether `zero_grad` looks at a gradient, which it removes if there is one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "zero_grad" or frame.f_code.co_filename not in _OF_ZERO_GRAD:
        return False
    return frame.f_locals.get("set_to_none") is True


def _refuse_other_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Refuse `tensor.data = data`, unless it is the end of an in-place operation such as `tensor.data -= x`."""
    with disable_torch_function():
        same = storage_key(tensor) == storage_key(data) and tensor.shape == data.shape
        same = same and tensor.stride() == data.stride() and tensor.storage_offset() == data.storage_offset()
    if not same:
        raise SPMDError(
            f"The step assigns to the .data of a tensor of shape {tuple(tensor.shape)}.",
            remedy="Write in place, under torch.no_grad(): tensor.copy_(values).",
            where=user_line(),
        )


@contextlib.contextmanager
def only_optimizers(known: list[Optimizer]) -> Iterator[None]:
    """Refuse steps of other optimizers than `known`: their parameters and states are not those of the program."""

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if not any(optimizer is each for each in known):
            raise SPMDError(
                f"The step uses an optimizer ({type(optimizer).__name__}) that is not among its arguments.",
                remedy="Pass it to the step, next to the model: step(model, optimizer, batch).",
                where=user_line(),
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
