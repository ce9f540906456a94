"""Reads of tensors that no dispatch mode sees: by Python's own protocols, through numpy, and through `.data`."""

import functools
from typing import Any, Protocol

import torch

from torch_testing_ext._torch.replacing import Replacement


class ReadListener(Protocol):
    """Hears of tensors that are read in any thread."""

    def on_read(self, method: str, tensor: torch.Tensor) -> None:
        """A method of the tensor is about to read it."""

    def on_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """`.data` of a tensor was taken, which counts writes by itself."""


_listeners: list[ReadListener] = []
_replaced: list[Replacement] = []  # while somebody listens


def listen_to_reads(listener: ReadListener) -> None:
    """Tell a listener of all reads from now on. Only while somebody listens are the methods of tensors others."""
    _listeners.append(listener)
    if len(_listeners) == 1:
        _replaced.append(Replacement("reads of tensors", _watched))


def stop_listening_to_reads(listener: ReadListener) -> None:
    """Tell it no more."""
    _listeners.remove(listener)
    if not _listeners:
        _replaced.pop().undo()


@functools.cache  # each asynchronous collective listens
def _watched(name: str, method: Any) -> Any:
    if name == "data":
        return _data(method)

    @functools.wraps(method)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for listener in list(_listeners):
            listener.on_read(name, self)
        return method(self, *args, **kwargs)

    return call


def _data(base: Any) -> property:
    def get(self: torch.Tensor) -> torch.Tensor:
        alias: torch.Tensor = base.__get__(self)
        for listener in list(_listeners):
            listener.on_alias(self, alias)
        return alias

    return property(get, base.__set__)
