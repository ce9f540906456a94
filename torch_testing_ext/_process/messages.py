"""Typed messages, and the channel that carries them with file descriptors."""

from __future__ import annotations

import array
import base64
import dataclasses
import enum
import functools
import json
import os
import socket
import types
import typing
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

# --------------------------------------------------------------------------------------------------------------------
# Messages between processes: frozen dataclasses, as JSON.
#
# A field may be a number, a string, a bool, None, bytes, a Path, an enum, another dataclass, or a tuple or mapping of
# these. The receiver decodes each field by its annotation.

T = TypeVar("T")


def to_json(message: Any) -> str:
    """One line of JSON: an object whose only key is the message's type; its value holds the fields."""
    return json.dumps({type(message).__name__: encode(message)})


def from_json(line: str | bytes, kinds: Mapping[str, type]) -> Any:
    """The message on one line; its type is one of `kinds`."""
    ((name, fields),) = json.loads(line).items()
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


def _of_dataclass(kind: type) -> _Convert:
    """Make the decoder of a dataclass, which decodes each field by its annotation."""
    # Found at the first value: a type may contain itself.
    decoders: dict[str, _Convert | None] | None = None

    def decode_fields(data: Any) -> Any:
        nonlocal decoders
        if decoders is None:
            hints = typing.get_type_hints(kind)
            decoders = {name: _decoder(hint) for name, hint in hints.items()}
        fields = {}
        for name, item in data.items():
            decoder = decoders[name]
            fields[name] = item if decoder is None else decoder(item)
        return kind(**fields)

    return decode_fields


# --------------------------------------------------------------------------------------------------------------------
# Typed messages between two processes, with file descriptors, over a Unix socket: one line of JSON each.

Received = TypeVar("Received")

_CHUNK = 1 << 16
_FD_SIZE = array.array("i").itemsize
# Linux sends no more in a message (SCM_MAX_FD); the receiver loses those for which it has no room.
_MOST_FDS = 253
_ANCILLARY_SIZE = socket.CMSG_LEN(_MOST_FDS * _FD_SIZE)


@dataclass(frozen=True, kw_only=True)
class WithDescriptors:
    """A message that carries file descriptors: the sender's when it is sent, the receiver's when it is received."""

    fds: tuple[int, ...] = ()


class Channel(Generic[Received]):
    """One end of a connection. `receives` is the union of the message types that the other end sends."""

    def __init__(self, sock: socket.socket, receives: Any):
        self._socket = sock
        self._kinds = by_name(receives)
        self._lines = LineBuffer()
        self._fds: deque[int] = deque()

    @classmethod
    def on(cls, fd: int, receives: Any) -> Channel[Received]:
        """The end on a descriptor that was inherited or received."""
        return cls(socket.socket(fileno=fd), receives)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, *fds: int) -> None:
        """Send a message. If the other end is gone, only receiving shows it."""
        if fds:
            message = replace(message, fds=fds)
        line = to_line(message)
        with suppress(BrokenPipeError, ConnectionResetError):
            if fds:
                # Not socket.send_fds: a file of the user's may have hidden the `array` that it needs.
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                line = line[self._socket.sendmsg([line], [rights]) :]
            self._socket.sendall(line)

    def receive(self) -> list[Received]:
        """Wait for data and return the messages that are complete. Raises EOFError when the other end is closed."""
        return self._receive(0)

    def receive_available(self) -> list[Received]:
        """The messages that have arrived so far, without waiting; none if the other end is gone."""
        received: list[Received] = []
        with suppress(BlockingIOError, EOFError):
            while True:
                received += self._receive(socket.MSG_DONTWAIT)
        return received

    def _receive(self, flags: int) -> list[Received]:
        """Receive data with these flags; return the messages that are complete."""
        try:
            # Not socket.recv_fds: it ignores its flags and would wait.
            data, ancillary, _, _ = self._socket.recvmsg(_CHUNK, _ANCILLARY_SIZE, flags)
        except ConnectionResetError:
            data, ancillary = b"", []
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._add_fds(content)
        if not data:
            raise EOFError
        received = []
        for line in self._lines.add(data):
            message = from_json(line, self._kinds)
            received.append(self._with_fds(message))
        return received

    def _add_fds(self, content: bytes) -> None:
        """Add the descriptors that came with data; `content` may end in a torn one."""
        whole = len(content) // _FD_SIZE * _FD_SIZE
        fds = array.array("i", content[:whole])
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds.extend(fds)

    def _with_fds(self, message: Any) -> Received:
        if isinstance(message, WithDescriptors):
            fds = [self._fds.popleft() for _ in message.fds]
            message = replace(message, fds=tuple(fds))
        received: Received = message
        return received

    def close(self) -> None:
        self._socket.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, never on descriptors 0 to 2.

    If this process has closed one of those, a later print would write into the connection.
    """
    with ExitStack() as fillers:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            fillers.callback(os.close, fd)
        os.close(fd)
        return socket.socketpair()
