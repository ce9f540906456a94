"""Sizes of inputs in a trace: symbols as long as the step computes with them, numbers once it does anything else.

A batch size is a symbol, so that one program serves all sizes. A step may do with a size whatever it does with a
number: loop over it, look it up, print it. Each such use fixes the symbol to its current value, and `SizeGuards` then
requires this value at later calls.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_testing_ext._torch.spmd import fixed_size

from ..spmd_errors import is_user_file
from .codes import kind_of_file


class SizeGuards:
    """The conditions on the sizes of input tensors under which a program is valid.

    They are evaluated lazily, because inductor may add conditions after the trace.
    """

    def __init__(self, shape_env: Any, fakes: list[torch.Tensor]) -> None:
        self.shape_env, self.fakes = shape_env, fakes

    def hold(self, tensors: list[torch.Tensor]) -> bool:
        """Whether tensors of these sizes may enter the program."""
        if any(tensors[i].shape[dim] != size for i, dim, size in self._fixed):
            return False
        text = self._expression
        return not text or bool(self.shape_env.evaluate_guards_expression(text, tensors))

    @functools.cached_property
    def _fixed(self) -> list[tuple[int, int, int]]:
        """The sizes with a single valid value, which the expression does not mention: tensor, dimension, value."""
        sizes = [(i, dim, fixed_size(size)) for i, fake in enumerate(self.fakes) for dim, size in enumerate(fake.shape)]
        return [(i, dim, size) for i, dim, size in sizes if size is not None]

    @functools.cached_property
    def _expression(self) -> str | None:
        text: str | None = self.shape_env.produce_guards_expression(self.fakes)
        return text


@contextlib.contextmanager
def sizes_as_numbers() -> Iterator[None]:
    """Let user code treat a symbolic size as the number that it is: as text, as a key, in isinstance checks.

    In isinstance checks, the symbol for a learning rate or the value of a tensor is a float as well.
    """
    symbol: Any = torch.SymInt
    originals = {name: symbol.__dict__[name] for name in ("__repr__", "__hash__")}

    def as_number(name: str, of_number: Callable[[int], Any]) -> Callable[[Any], Any]:
        original = originals[name]

        @functools.wraps(original)
        def method(self: Any) -> Any:
            return of_number(int(self)) if _called_by_user() else original(self)

        return method

    symbol.__repr__ = as_number("__repr__", repr)
    symbol.__hash__ = as_number("__hash__", hash)
    numbers: list[tuple[Any, type]] = [(symbol, int), (torch.SymFloat, float)]
    for kind, number in numbers:
        kind.__getattribute__ = _seen_as(number)
    try:
        yield
    finally:
        symbol.__repr__, symbol.__hash__ = originals["__repr__"], originals["__hash__"]
        for kind, _ in numbers:
            del kind.__getattribute__


def _seen_as(number: type) -> Callable[[Any, str], Any]:
    """An attribute access by which the class of a symbol is `number` for user code."""

    def get(symbol: Any, name: str) -> Any:  # torch calls it tens of thousands of times in a trace
        if name == "__class__" and _is_of_user(sys._getframe(1).f_code.co_filename):
            return number
        return object.__getattribute__(symbol, name)

    return get


def _called_by_user() -> bool:
    """Whether user code runs the expression that called the method of a symbol."""
    return _is_of_user(sys._getframe(2).f_code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_of_user(filename: str) -> bool:
    return is_user_file(filename) or kind_of_file(filename) == "user"
