"""Connects the main process of a unit with the ranks that it has on other nodes: the agent's end of a socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch_testing_ext._process.channel import Channel, address_of
from torch_testing_ext._process.loop import EventLoop
from torch_testing_ext.launch.blocks import Room
from torch_testing_ext.launch.protocol import FromNode, NodeLost, RoomOfNodes, ToNode


class NodeLink:
    """Waits for one process to connect, and passes messages on."""

    def __init__(self, path: Path, rooms: tuple[Room, ...], loop: EventLoop, send: Callable[[ToNode], object]):
        """`send` is called with each message of the main process. Raises OSError."""
        self.path = path
        self._loop = loop
        self._send = send
        self._channel: Channel[ToNode] | None = None
        self._early: list[RoomOfNodes | FromNode | NodeLost] = [RoomOfNodes(rooms)]
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            with address_of(path) as address:
                self._listener.bind(address)
            self._listener.listen(1)
        except OSError:
            self._listener.close()
            raise
        loop.listen(self._listener, self._accept)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        self._close_listener()  # the others that run below the unit are not its main process
        self._channel = Channel(sock, ToNode)
        for message in self._early:
            self._channel.send(message)
        self._loop.listen(self._channel, self._receive)

    def _close_listener(self) -> None:
        self._loop.forget(self._listener)
        self._listener.close()
        with suppress(OSError):
            self.path.unlink()

    def _receive(self) -> None:
        assert self._channel is not None
        try:
            for message in self._channel.receive():
                self._send(message)
        except (EOFError, OSError):
            self._loop.forget(self._channel)

    def send(self, message: FromNode | NodeLost) -> None:
        if self._channel is None:
            self._early.append(message)
        else:
            self._channel.send(message)

    def close(self) -> None:
        self._close_listener()
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.close()
