"""The other nodes on which a test has ranks, as its main process sees them: a way for messages to fork servers there.

Whoever has started the main process connects it with them, by a socket whose path it leaves in the environment.
"""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

from torch_testing_ext._collectives import raw
from torch_testing_ext._process import messages
from torch_testing_ext._process.channel import Channel, address_of
from torch_testing_ext._process.loop import wait_readable

from .accounts import shifted
from .protocol import FileOfRun, FromNode, FromServer, NodeLost, RoomOfNodes, ToMainProcess, ToNode, ToServer

_PATIENCE = 60.0
_KINDS = messages.by_name(FromServer)


class OtherNodes:
    """The connection with the fork servers of other nodes."""

    def __init__(self, path: Path, environ: Mapping[str, str]):
        """`environ`: that of the main process at its start. Raises OSError if nobody answers."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            with address_of(path) as address:
                sock.connect(address)
        except OSError:
            sock.close()
            raise
        self.channel: Channel[ToMainProcess] = Channel(sock, ToMainProcess)
        self._environ = dict(environ)
        self.rooms = self._first_message().rooms

    def _first_message(self) -> RoomOfNodes:
        until = time.monotonic() + _PATIENCE
        received: list[ToMainProcess] = []
        while not received:
            if not wait_readable(self.channel, until):
                raise TimeoutError(f"nothing was heard of the other nodes for {_PATIENCE:.0f} s")
            received = self.channel.receive()
        (first,) = received
        assert isinstance(first, RoomOfNodes)
        return first

    def send(self, group: int, message: ToServer) -> None:
        self.channel.send(ToNode(group, messages.to_json(message)))

    def receive(self) -> list[tuple[int, FromServer | NodeLost, float]]:
        """For each message: the group it comes from, and what to add to its times."""
        received: list[tuple[int, FromServer | NodeLost, float]] = []
        for message in self.channel.receive():
            match message:
                case FromNode(group, line, ahead):
                    received.append((group, messages.from_json(line, _KINDS), ahead))
                case NodeLost(group):
                    received.append((group, message, 0.0))
                case RoomOfNodes():
                    raise AssertionError("a second RoomOfNodes")
        return received

    def changes(self, environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """The variables that differ from those at the start of the main process, and those that are gone."""
        changed = {name: text for name, text in environ.items() if self._environ.get(name) != text}
        return changed, tuple(name for name in self._environ if name not in environ)

    def close(self) -> None:
        self.channel.close()


def put(file: FileOfRun, directory: Path, ahead: float) -> None:
    """Write a file that ranks of another node have written, with its times as those of this node."""
    path, data = directory / file.name, zlib.decompress(file.data)
    kind = path.suffix
    if kind == ".account":
        data = shifted(data, ahead)
    elif kind in (".look", ".recorder"):
        data = raw.shifted(data, ahead)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == ".sanitizer":  # its reader has mapped it
        _overwrite(path, data)
        return
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)


def _overwrite(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
