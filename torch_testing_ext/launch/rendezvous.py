"""Where the ranks of several nodes meet: a store of TCP beside the first fork server, and how a rank finds it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from torch_testing_ext._process import child, interpreter, system
from torch_testing_ext._process.loop import EventLoop

from .job import Job
from .protocol import StoreOpened

_NUMBER = struct.Struct("=i")
_SIOCGIFADDR = 0x8915
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass
class _Store:
    pid: int
    pipe: int


class Stores:
    """The stores of runs with ranks on several nodes: a process each, which outlives all ranks of its run."""

    def __init__(self, loop: EventLoop, send: Callable[[StoreOpened], object]):
        self._loop = loop
        self._send = send
        self._stores: dict[int, _Store] = {}

    @property
    def pids(self) -> set[int]:
        return {store.pid for store in self._stores.values()}

    def open(self, run: int, in_child: Callable[[], object] | None) -> None:
        """Start the process. `in_child` closes what a fork inherits; None starts a new interpreter."""
        reading, writing = os.pipe()
        try:
            if in_child is None:
                pid = _spawn(writing)
            else:

                def serve() -> NoReturn:
                    os.close(reading)
                    in_child()
                    serve_store(writing)

                pid = child.fork_child(serve)
        except OSError:
            os.close(reading)
            self._send(StoreOpened(run, 0))
            return
        finally:
            os.close(writing)
        self._stores[run] = _Store(pid, reading)
        self._loop.listen(reading, partial(self._hear, run))

    def _hear(self, run: int) -> None:
        store = self._stores[run]
        data = os.read(store.pipe, _NUMBER.size)
        self._loop.forget(store.pipe)
        self._send(StoreOpened(run, _NUMBER.unpack(data)[0] if len(data) == _NUMBER.size else 0))

    def close(self, run: int) -> None:
        store = self._stores.pop(run, None)
        if store is not None:
            with suppress(ProcessLookupError):
                os.kill(store.pid, signal.SIGKILL)
            self._loop.forget(store.pipe)
            os.close(store.pipe)

    def forget(self) -> None:
        """In a forked child."""
        for store in self._stores.values():
            os.close(store.pipe)


def serve_store(writing: int) -> NoReturn:
    """Serve a store until this process is killed; write its port."""
    from torch_testing_ext._torch import node_stores

    store = node_stores.serve()
    os.write(writing, _NUMBER.pack(store.port))
    os.close(writing)
    while True:
        time.sleep(3600)


def _spawn(writing: int) -> int:
    os.set_inheritable(writing, True)
    words = interpreter.command("launch.rendezvous", sys.path, str(writing), str(os.getpid()))
    return os.posix_spawn(sys.executable, words, dict(os.environ), setsigmask=())


def main() -> NoReturn:
    """A store in a new interpreter: `python -c "... main()" PIPE PARENT`."""
    writing, parent = map(int, sys.argv[1:3])
    child.start_session(parent, signal.SIGKILL)
    serve_store(writing)


# -- in a rank


def meet(job: Job, rank: int) -> None:
    """Let a rank find those of the other nodes, if it has any, by the variables and by the files of its test."""
    block = job.block
    if block is None:
        return
    os.environ.update(block.environ_of(rank, job.world_size))
    interface = interface_to(block.peer)
    for name in _INTERFACES:
        if interface is None or (block.keeps_interface and name in os.environ):
            continue
        if name == "GLOO_SOCKET_IFNAME" or name not in os.environ:
            os.environ[name] = interface
    from torch_testing_ext._torch import node_stores

    node_stores.share_files(block.address, block.port, str(job.directory))


def interface_to(address: str) -> str | None:
    """The network interface that packets to an address leave by; None if that cannot be found out."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with suppress(OSError):
                    found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    if socket.inet_ntoa(found[20:24]) == own:
                        return name
    except OSError:
        return None
    return system.LOOPBACK if own.startswith("127.") else None
