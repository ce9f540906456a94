"""Refusal of what a traced program would not repeat: reads of values into Python, and collectives in place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_testing_ext._torch.spmd import data_dependent_errors, is_fake, object_collectives_call

from ..spmd_errors import SPMDError, is_own_file, is_user_file, user_line
from .trace_modes import TraceWatch, collective_error

_ARRAYS: set[Any] = {torch.Tensor.numpy, torch.Tensor.__array__}
_MEMORY: set[Any] = {
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.storage_offset,
    getattr(torch.Tensor, "_is_view"),  # noqa: B009
    torch.Tensor.is_shared,
}
_MEMORY_PROPERTIES = {"_base", "_version"}
_TEXTS: set[Any] = {torch.Tensor.__repr__, torch.Tensor.__format__}


class UserCodeMode(TorchFunctionMode):
    """A mode that sees the functions of torch that the step calls.

    It refuses those that read a tensor into Python, and notices `torch.autograd.grad`, whose results are a rank's own:
    DDP averages only in `backward`.
    """

    def __init__(self, watch: TraceWatch, raised: list[Exception]) -> None:
        super().__init__()
        self.watch, self.raised = watch, raised

    def recording(self, func: Any) -> Any:
        """`func`, whose errors on values that a trace does not have are recorded: a step may catch them."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return func(*args, **kwargs)
            except data_dependent_errors() as error:
                if _asked_by_user():
                    self.raised.append(error)
                raise

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ARRAYS and is_fake(args[0]):
            raise _value_error("turns a tensor into a numpy array")
        if func in _TEXTS and is_fake(args[0]) and _asked_by_user():
            raise _value_error("turns a tensor into text")
        if (func in _MEMORY or _getter_of(func) in _MEMORY_PROPERTIES) and _asked_by_user():
            raise SPMDError(
                f"The step asks where a tensor lies in memory ({_getter_of(func) or func.__name__}), which differs "
                "from call to call.",
                remedy="Tell tensors apart by their names, or with `is`.",
                where=user_line(),
            )
        if func is not torch.autograd.grad:
            return self.recording(func)(*args, **kwargs)
        self.watch.inside_autograd_grad += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.watch.inside_autograd_grad -= 1


class NumberAsText(SPMDError):
    """The step turns a number into text that a trace does not know: of a tensor, or a learning rate."""


def _getter_of(func: Any) -> str | None:
    """The name of the property that `func` gets, if it gets one."""
    return getattr(func.__self__, "__name__", None) if getattr(func, "__name__", "") == "__get__" else None


def _value_error(what: str, kind: type[SPMDError] = SPMDError) -> SPMDError:
    return kind(
        f"The step {what}. The traced program has no values while it is traced, and runs no Python code later.",
        remedy="Return the tensor from the step, and convert or print it outside.",
        where=user_line(),
    )


def _asked_by_user() -> bool:
    """Whether the nearest caller outside of this package and torch's `Tensor` is user code, and not torch itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_transparent(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def _is_transparent(filename: str) -> bool:
    """Whether a file's code passes on what its caller asked for: our modes, or the methods of torch's `Tensor`."""
    return is_own_file(filename) or filename in (torch.Tensor.__repr__.__code__.co_filename, torch.overrides.__file__)


@contextlib.contextmanager
def refusing_values_as_text(mode: UserCodeMode) -> Iterator[None]:
    """Refuse to turn the result of `.item()`, which a trace does not know, into text, and record other reads of it."""
    symbol: Any = torch.SymFloat
    original = symbol.__repr__

    def text(self: Any) -> str:
        if _asked_by_user():
            raise _value_error("turns the value of a tensor into text", NumberAsText)
        return original(self)  # type: ignore[no-any-return]

    def formatted(self: Any, spec: str) -> str:
        if _asked_by_user():
            raise _value_error("turns the value of a tensor into text", NumberAsText)
        return format(original(self), spec)

    symbol.__repr__, symbol.__format__ = text, formatted
    read = [(torch.SymBool, "__bool__"), (symbol, "__bool__"), (symbol, "__float__"), (symbol, "__int__")]
    readers = [(kind, name, kind.__dict__[name]) for kind, name in read if name in kind.__dict__]
    for kind, name, reader in readers:
        setattr(kind, name, mode.recording(reader))
    try:
        yield
    finally:
        symbol.__repr__ = original
        del symbol.__format__
        for kind, name, reader in readers:
            setattr(kind, name, reader)


@contextlib.contextmanager
def refusing_object_collectives() -> Iterator[None]:
    """Refuse collectives of Python objects, which a traced program would not repeat."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise collective_error("a collective of Python objects")

    with object_collectives_call(refuse):
        yield
