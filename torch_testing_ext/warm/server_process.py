"""The server: the stage at the top, which listens for clients. It has imported nothing of any project, nor torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch_testing_ext._process import system
from torch_testing_ext._process.private_folders import socket_name

from . import handover, warm_program
from .read_record import ReadRecord
from .stage import ProgramBegins, Stage, reap_children
from .stashed_modules import Stash
from .warm_program import FreshInterpreter, ProgramRequest

_LOOK_INTERVAL = 2.0


class WarmServer:
    """The process of the server."""

    def __init__(self, listener: socket.socket, fresh: FreshInterpreter, idle: float, is_there: Callable[[], bool]):
        """`is_there`: whether clients find the listener."""
        self._listener, self._idle, self._is_there = listener, idle, is_there
        self._notes, write_notes = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notes.setblocking(False)
        self._set_by: dict[str, dict[str, str | None]] = {}  # variables that programs set before they import torch
        self._cold: dict[str, ReadRecord] = {}  # programs with modules of their own, while these folders are so
        self._runs = 0
        self._stage = Stage(0, write_notes.detach(), fresh, Stash(fresh.modules, fresh.path))
        record = self._stage.record
        record.add_modules([*sys.modules])
        record.add_file(os.path.join(sys.prefix, "pyvenv.cfg"))
        for folder in fresh.path:
            record.add_folder(folder)
            for name in record.folders[folder][1]:
                if name.endswith((".pth", "customize.py")):
                    record.add_file(os.path.join(folder, name))

    def serve(self) -> None:
        """Serve clients until this is stale, idle or told to stop. In a program, ProgramBegins comes out of it."""
        if self._stage.record.unsettled() is not None:
            self._stage.record.files["/"] = None  # it may differ from what was read: never fresh
        reap_children()
        while self._wait():
            client, _ = self._listener.accept()
            client.settimeout(5.0)
            answer: dict[str, Any] = {"cold": "the server cannot read the request"}
            fds: list[int] = []
            # No `finally`: a program leaves this by ProgramBegins, and these descriptors are not its own.
            with contextlib.suppress(EOFError, OSError, ValueError, KeyError, TypeError):
                message, fds = handover.receive(client)
                answer = self._answer(message, [client.fileno(), *fds])
            with contextlib.suppress(OSError):
                if "taken" not in answer:
                    handover.send(client, answer)
            for fd in fds:
                os.close(fd)
            client.close()
            if "stale" in answer or "stopped" in answer:
                return

    def _wait(self) -> bool:
        """Wait for a client. Returns False when idle, or when no client can come any more: the socket is gone."""
        until = time.monotonic() + self._idle
        while (left := until - time.monotonic()) > 0 and self._is_there():
            if select.select([self._listener], [], [], min(left, _LOOK_INTERVAL))[0]:
                return True
        return False

    def _answer(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        match message["ask"]:
            case "status":
                size = system.descendants(os.getpid())
                return {"pid": os.getpid(), "runs": self._runs, "processes": len(size) + 1}
            case "stop":
                return {"stopped": os.getpid()}
        self._take_notes()
        name = ProgramRequest(message, fds[1:]).identity
        cold = self._cold.get(name)
        if cold is not None and cold.changed() is None:
            return {"cold": ""}
        environ = {**message["environ"], **self._set_by.get(name, {})}
        message["seen_by_imports"] = {name: value for name, value in environ.items() if value is not None}
        answer = self._stage.answer(message, fds)
        self._runs += "taken" in answer
        return answer

    def _take_notes(self) -> None:
        """Learn from programs that had to start again."""
        with contextlib.suppress(BlockingIOError):
            while True:
                note = json.loads(self._notes.recv(1 << 20))
                known = self._set_by.setdefault(note["program"], {})
                if any(known.get(name, "") != value for name, value in note["environ"].items()):
                    known.update(note["environ"])
                    continue
                record = self._cold[note["program"]] = ReadRecord()
                for folder in note["folders"]:
                    record.add_folder(folder)


def main(modules: list[str], path: list[str]) -> Callable[[], object]:
    """Serve, as `python -c CODE SOCKET IDLE READY`. Returns a program in a process that is to run one."""
    place, idle, ready = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    fresh = FreshInterpreter(modules, path)
    os.chdir("/")
    listener = socket.socket(socket.AF_UNIX, handover.KIND)
    draft = f"{place}.{os.getpid()}"
    with socket_name(draft) as name:
        listener.bind(name)
    listener.listen(64)
    os.rename(draft, place)  # the socket that a killed server has left goes
    number = os.stat(place).st_ino

    def is_there() -> bool:
        try:
            return os.stat(place).st_ino == number
        except OSError:
            return False

    try:
        server = WarmServer(listener, fresh, idle, is_there)
        os.close(ready)
        server.serve()
    except ProgramBegins as begins:
        return partial(warm_program.run, begins.run)
    if is_there():
        with contextlib.suppress(OSError):
            os.unlink(place)
    os._exit(0)
