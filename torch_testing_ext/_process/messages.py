"""Messages between processes: frozen dataclasses, as JSON.

A field may be a number, a string, a bool, None, bytes, a Path, an enum, another dataclass, or a tuple or mapping of
these. The receiver decodes each field by its annotation.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def to_json(message: Any) -> str:
    """One line of JSON: an object whose only key is the message's type; its value holds the fields."""
    return json.dumps({type(message).__name__: _fields(message)})


def from_json(line: str | bytes, kinds: Mapping[str, type]) -> Any:
    """The message on one line; its type is one of `kinds`."""
    ((kind, data),) = json.loads(line).items()
    return decode(kinds[kind], data)


def by_name(union: Any) -> dict[str, type]:
    """The types of a union, or a single type, by name."""
    return {kind.__name__: kind for kind in typing.get_args(union) or (union,)}


def unexpected(message: NoReturn) -> NoReturn:
    """At the end of a `match` over all types of a union: a type checker complains if one is missing.

    Python has typing.assert_never since 3.11.
    """
    raise AssertionError(f"unexpected message: {message!r}")


def encode(value: Any) -> Any:
    """A value in the form in which JSON can hold it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    match value:
        case enum.Enum():
            return value.value
        case bytes():
            return base64.b64encode(value).decode("ascii")
        case Path():
            return str(value)
        case tuple() | list():
            return [encode(item) for item in value]
        case frozenset():
            return [encode(item) for item in sorted(value, key=str)]
        case Mapping():
            return {key: encode(item) for key, item in value.items()}
        case _:
            return value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}


def decode(kind: Any, data: Any) -> Any:
    """The value of the annotated type that `encode` turned into `data`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if data is None else decode(next(one for one in arguments if one is not type(None)), data)
    if origin is tuple:
        inner = arguments[:1] * len(data) if arguments[1:] == (...,) else arguments
        return tuple(decode(one, item) for one, item in zip(inner, data, strict=True))
    if origin is frozenset:
        return frozenset(decode(arguments[0], item) for item in data)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: decode(arguments[1], item) for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(type, kind))
        return typing.cast(Any, kind)(**{name: decode(hints[name], item) for name, item in data.items()})
    if kind is bytes:
        return base64.b64decode(data)
    if isinstance(kind, type) and issubclass(kind, (enum.Enum, Path)):
        return kind(data)
    return data


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
