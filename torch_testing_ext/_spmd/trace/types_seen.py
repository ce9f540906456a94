"""The types that code sees in a trace: those of the tensors that fakes stand for."""

from __future__ import annotations

import functools
import sys
from types import CodeType
from typing import Any

import torch
from torch import nn

from torch_testing_ext._torch.spmd import is_fake, show_class_of_fakes

from .codes import kind_of_file


class _SeesTensors(type):
    """Makes a class that acts like `type`, but returns for a fake the type that it stands for."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and is_fake(args[0]):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        found = type(*args, **kwargs)
        if found is torch.SymFloat:  # a learning rate, or the value of a tensor
            return float
        return type_seen if found is type else found

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)

    def __getattribute__(cls, name: str) -> Any:
        return getattr(type, name)

    def __eq__(cls, other: Any) -> bool:
        return other is type or other is type_seen

    def __hash__(cls) -> int:
        return hash(type)


class type_seen(metaclass=_SeesTensors):
    """Stands in for `type` in the globals of code that a trace runs."""


_DISPATCH = functools.singledispatch(lambda value: None).__code__  # type: ignore[attr-defined]


def asks_for_class(code: CodeType, kind: str) -> bool:
    """Whether code, of this kind, asks for the `__class__` of values for the step."""
    return code is _DISPATCH or (kind != "system" and "__class__" in code.co_names)


def show_classes() -> None:
    """Let user code and `functools.singledispatch` see the class of the tensor that a fake stands for."""
    show_class_of_fakes(_class_seen)


def _class_seen(fake: Any) -> Any:
    code = sys._getframe(2).f_code
    if code is not _DISPATCH and kind_of_file(code.co_filename) == "system":
        return type(fake)
    return nn.Parameter if isinstance(fake, nn.Parameter) else torch.Tensor


def put_in(module_globals: dict[str, Any]) -> bool:
    """Let code with these globals use it. Returns whether that changes them."""
    if "type" in module_globals:
        return False
    module_globals["type"] = type_seen
    return True


def take_from(module_globals: dict[str, Any]) -> None:
    """Undo `put_in`."""
    if module_globals.get("type") is type_seen:
        del module_globals["type"]
