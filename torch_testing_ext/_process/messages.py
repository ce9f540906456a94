"""Typed messages between processes: frozen dataclasses, as JSON.

A field may be a number, a string, a bool, None, bytes, a Path, an enum, another dataclass, or a tuple or mapping of
these. The receiver decodes each field by its annotation.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from json import dumps, loads
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def to_json(message: Any) -> str:
    """One line of JSON: an object whose only key is the message's type; its value holds the fields."""
    return dumps({type(message).__name__: encode(message)})


def from_json(line: str | bytes, kinds: Mapping[str, type]) -> Any:
    """The message on one line; its type is one of `kinds`."""
    ((name, fields),) = loads(line).items()
    return decode(kinds[name], fields)


def to_line(message: Any) -> bytes:
    """A message as it goes through a stream of bytes."""
    return to_json(message).encode() + b"\n"


class LineBuffer:
    """Splits a stream of bytes into lines, however it is cut into pieces."""

    def __init__(self) -> None:
        self._unread: list[bytes] = []

    def add(self, data: bytes) -> list[bytes]:
        """Add a piece, and return the lines that are complete now."""
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self._unread.append(data)
            return []
        whole = b"".join([*self._unread, head])
        self._unread = [rest] if rest else []
        return whole.split(b"\n")


@contextmanager
def sharing() -> Iterator[None]:
    """Within the block, a value that equals the last one of its type is that one: most lines of a file say the same."""
    before, _last.values = _last.values, {}
    try:
        yield
    finally:
        _last.values = before


def by_name(union: Any) -> dict[str, type]:
    """The types of a union, or a single type, by their names."""
    kinds = typing.get_args(union) or (union,)
    return {kind.__name__: kind for kind in kinds}


def unexpected(message: NoReturn) -> NoReturn:
    """At the end of a `match` over all types of a union: a type checker complains if one is missing.

    Python has typing.assert_never since 3.11.
    """
    raise AssertionError(f"unexpected message: {message!r}")


def encode(value: Any) -> Any:
    """A value in the form in which JSON can hold it."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    encoder = _encoder(kind)
    return encoder(value)


def decode(kind: Any, data: Any) -> Any:
    """The value of the annotated type that `encode` turned into `data`."""
    decoder = _decoder(kind)
    return data if decoder is None else decoder(data)


# What to do follows from the type alone, and is found out once for each: a run sends thousands of messages.
_PLAIN = frozenset({str, int, float, bool, type(None)})
_Convert = Callable[[Any], Any]


@functools.cache
def _encoder(kind: type) -> _Convert:
    """Find the encoder of a type."""
    if dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
        return lambda value: {name: encode(getattr(value, name)) for name in names}
    if issubclass(kind, enum.Enum):
        return lambda value: value.value
    if issubclass(kind, bytes):
        return lambda value: base64.b64encode(value).decode("ascii")
    if issubclass(kind, Path):
        return str
    if issubclass(kind, (tuple, list)):
        return lambda value: [encode(item) for item in value]
    if issubclass(kind, frozenset):
        return lambda value: [encode(item) for item in sorted(value, key=str)]
    if issubclass(kind, Mapping):
        return lambda value: {key: encode(item) for key, item in value.items()}
    return lambda value: value


@functools.cache
def _decoder(kind: Any) -> _Convert | None:
    """Find the decoder of a type; None if such a value is the same in JSON."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        value_kinds = [argument for argument in arguments if argument is not type(None)]
        return _of_optional(value_kinds[0])
    if origin is tuple:
        return _of_tuple(arguments)
    if origin is frozenset:
        (item_kind,) = arguments
        return lambda data: frozenset(decode(item_kind, item) for item in data)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key_kind, value_kind = arguments
        key_of = int if key_kind is int else str
        return lambda data: {key_of(key): decode(value_kind, item) for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _of_dataclass(typing.cast(type, kind))
    if kind is bytes:
        return base64.b64decode
    if not isinstance(kind, type):
        return None
    if issubclass(kind, (enum.Enum, Path)):
        return kind
    is_named_tuple = issubclass(kind, tuple) and kind is not tuple
    return (lambda data: kind(*data)) if is_named_tuple else None


def _of_optional(kind: Any) -> _Convert | None:
    if _decoder(kind) is None:
        return None
    return lambda data: None if data is None else decode(kind, data)


def _of_tuple(arguments: tuple[Any, ...]) -> _Convert:
    if arguments[1:] == (...,):
        inner = arguments[0]
        return lambda data: tuple([decode(inner, item) for item in data])

    def decode_items(data: Any) -> tuple[Any, ...]:
        items = [decode(kind, item) for kind, item in zip(arguments, data, strict=True)]
        return tuple(items)

    return decode_items


class _Last:
    """The last value of each type, with its data; None if values are not shared."""

    values: dict[type, tuple[Any, Any]] | None = None


_last = _Last()


def _of_dataclass(kind: type) -> _Convert:
    """Make the decoder of a dataclass, which decodes each field by its annotation."""
    # Found at the first value: a type may contain itself.
    decoders: dict[str, _Convert | None] | None = None

    def decode_fields(data: Any) -> Any:
        nonlocal decoders
        last = _last.values
        if last is not None and kind in last and last[kind][0] == data:
            return last[kind][1]
        if decoders is None:
            hints = typing.get_type_hints(kind)
            decoders = {name: _decoder(hint) for name, hint in hints.items()}
        fields = {}
        for name, item in data.items():
            decoder = decoders[name]
            fields[name] = item if decoder is None else decoder(item)
        value = kind(**fields)
        if last is not None:
            last[kind] = data, value
        return value

    return decode_fields
