"""Attributes that users give to tensors, such as `p.lr_scale = 0.1`, and what a step sees of them.

Fakes do not have them. A step that asks a fake for one gets that of the real tensor, which becomes a guard. An
attribute of an input, another tensor in each call, is refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_testing_ext._torch.spmd import fakes_lacking_attributes

from ..spmd_errors import SPMDError, user_line
from .codes import kind_of_code
from .train_state import StepState

absent = object()
_OF_TORCH = ("_sizes_capsule", "_strides_capsule")  # of symbolic sizes
_OF_DTENSOR = {"_local_tensor", "_spec", "_is_param"}


@dataclass
class TensorAttribute:
    """The attribute `name` of parameter or buffer number `index`.

    labels: what knows the current state of the model, which may hold other tensors at each call.
    """

    labels: Any
    kind: str
    index: int
    name: str

    def value(self) -> Any:
        """The value of the attribute, or `absent`."""
        state = self.labels.state
        refs = state.params if self.kind == "param" else state.buffers
        return own_attribute(refs[self.index].value, self.name)


def own_attribute(tensor: torch.Tensor, name: str) -> Any:
    """The value of a tensor's attribute that a user named, or `absent`."""
    if isinstance(tensor, DTensor) and name in _OF_DTENSOR:
        return absent
    return tensor.__dict__.get(name, absent)


class TensorAttributes:
    """The attributes of fakes that a step asks for.

    owner_of: for the id of a fake, "param", "buffer" or "arg" and the number of the real tensor.
    found: called with each attribute that the step asks for, and returns what the step sees.
    """

    def __init__(
        self,
        state: StepState,
        owner_of: dict[int, tuple[str, int]],
        inputs: list[Any],
        found: Callable[[TensorAttribute], Any],
    ) -> None:
        self.state, self.owner_of, self.inputs, self.found = state, owner_of, inputs, found
        self.read: dict[tuple[str, int, str], TensorAttribute] = {}

    @contextlib.contextmanager
    def answering(self, fakes: list[torch.Tensor]) -> Iterator[None]:
        """Answer for attributes in this context, and refuse a step that gives attributes to any of `fakes`."""
        before = [dict(fake.__dict__) for fake in fakes]
        with fakes_lacking_attributes(self._get):
            yield
        for fake, known in zip(fakes, before, strict=True):
            if new := [name for name in fake.__dict__ if name not in known and not name.startswith(_OF_TORCH)]:
                raise SPMDError(
                    f"The step sets the attribute {new[0]} of a parameter, buffer or input. The traced program runs no "
                    "Python code: it would be set only once.",
                    remedy="Return the value from the step, or keep it in a registered buffer.",
                )

    def _get(self, fake: Any, name: str) -> Any:
        owner = self.owner_of.get(id(fake))
        if owner is None or name.startswith("__"):
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        kind, index = owner
        if kind == "arg":
            value = own_attribute(self.inputs[index], name)
            if value is not absent:
                raise SPMDError(
                    f"The step reads the attribute {name} of an input tensor, which may be another one in each call.",
                    remedy="Pass it to the step as an argument of its own.",
                    where=user_line(),
                )
        else:
            key = kind, index, name
            asked = TensorAttribute(self, kind, index, name)
            value = asked.value()
            if key in self.read or value is not absent or _asked_by_user(sys._getframe(2)):
                asked = self.read.setdefault(key, asked)
                value = self.found(asked)
        if value is absent:
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        return value


def _asked_by_user(frame: Any) -> bool:
    return kind_of_code(frame.f_code, frame.f_globals) != "system"
