"""The results of a step: tensors in containers that each call can build for itself, and plain values."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_testing_ext._torch.spmd import is_fake

from ..spmd_errors import SPMDError
from .call_arguments import attributes_of_record, flatten_arguments, is_record, rebuild_arguments

# Nobody can change these, and they contain no tensors.
_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type(...), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool),
    *(fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta),
    *(type, types.ModuleType),
)


def leaves_of(result: Any) -> tuple[list[Any], Any]:
    """The leaves of a result, and its structure without them, for `rebuilt`."""
    leaves: list[Any] = []
    try:
        flatten_arguments(result, leaves, [])
        if _has_tensors_as_keys(result):
            raise SPMDError("The step returns a dict with tensors as keys.", remedy="Use them as values.")
    except RecursionError:
        raise SPMDError("The step returns an object that contains itself.", remedy="Return its parts.") from None
    return leaves, rebuild_arguments(result, iter([None] * len(leaves)))


def rebuilt(structure: Any, leaves: Iterable[Any]) -> Any:
    """A new result of the structure that `leaves_of` found."""
    return rebuild_arguments(structure, iter(leaves))


def _has_tensors_as_keys(value: Any) -> bool:
    if is_record(value):
        return any(map(_has_tensors_as_keys, attributes_of_record(value).values()))
    if isinstance(value, dict):
        return any(isinstance(key, torch.Tensor) for key in value) or any(map(_has_tensors_as_keys, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_tensors_as_keys, value))


def refuse_opaque(value: Any, known: bool, does: str) -> None:
    """Refuse an object that each run of the step would make for itself, or that holds tensors of the trace.

    `known`: the object is an argument of the step. `does`: what the step does with it.
    """
    if known or _is_constant(value):
        return
    raise SPMDError(
        f"The step {does} an object of type {type(value).__name__}. The traced program could only repeat the object of "
        "the trace.",
        remedy="Use tensors and plain values, in tuples, lists, dicts, named tuples or dataclasses.",
    )


def _is_constant(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not is_fake(value)
    if isinstance(value, nn.Module):
        return not any(map(is_fake, [*value.parameters(), *value.buffers()]))
    if isinstance(value, frozenset):
        return all(map(_is_constant, value))
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return _is_plain_function(value)
    return isinstance(value, (*_CONSTANTS, Optimizer))


def _is_plain_function(function: Any) -> bool:
    """Whether a function cannot hold anything of the step: neither a method of an object, nor a closure made there."""
    if isinstance(function, types.BuiltinFunctionType):
        return isinstance(function.__self__, (types.ModuleType, type, type(None)))
    made_inside = "<locals>" in function.__qualname__
    return not (made_inside and (function.__closure__ or function.__defaults__ or function.__kwdefaults__))
