"""Values that are computed when they are first used."""

import functools
import operator
from collections.abc import Callable
from typing import Any


class LazyVal:
    """Stands for a value that is computed at its first comparison, arithmetic operation or truth test."""

    def __init__(self, cb: Callable[[], Any]) -> None:
        self._cb = cb

    @functools.cached_property
    def _value(self) -> Any:
        return self._cb()

    def __bool__(self) -> bool:
        return bool(self._value)

    def __int__(self) -> int:
        return int(self._value)

    __hash__ = None  # type: ignore[assignment]


def _late(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: operation(self._value, *others)


_BINARY = "add sub mul truediv floordiv mod pow lshift rshift and or xor eq ne lt le gt ge"
_UNARY = "neg pos abs invert index"
for _name in f"{_BINARY} {_UNARY}".split():
    setattr(LazyVal, f"__{_name}__", _late(getattr(operator, f"__{_name}__")))
