"""Reads of tensors that no dispatch mode sees: by Python's own protocols, through numpy, and through `.data`."""

import functools
from typing import Any, Protocol

import torch

# All of 2.11 to 2.15, here or in a base class.
_METHODS = (
    *("__array__", "__bool__", "__float__", "__format__", "__int__", "__reduce_ex__", "__repr__"),
    *("item", "numpy", "tolist"),
)


class ReadListener(Protocol):
    """Hears of tensors that are read in any thread."""

    def on_read(self, method: str, tensor: torch.Tensor) -> None:
        """A method of the tensor is about to read it."""

    def on_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """`.data` of a tensor was taken, which counts writes by itself."""


_listeners: list[ReadListener] = []
_replaced: dict[str, Any] = {}  # the attributes that `torch.Tensor` had itself; None for one of its base


def listen_to_reads(listener: ReadListener) -> None:
    """Tell a listener of all reads from now on. Only while somebody listens are the methods of tensors others."""
    _listeners.append(listener)
    if len(_listeners) == 1:
        for name in (*_METHODS, "data"):
            _replaced[name] = vars(torch.Tensor).get(name)
            setattr(torch.Tensor, name, _watched(name, getattr(torch.Tensor, name)))


def stop_listening_to_reads(listener: ReadListener) -> None:
    """Tell it no more."""
    _listeners.remove(listener)
    if not _listeners:
        for name, method in _replaced.items():
            delattr(torch.Tensor, name) if method is None else setattr(torch.Tensor, name, method)
        _replaced.clear()


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
