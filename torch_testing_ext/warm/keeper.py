"""The keeper of one program: its parent, which tells the client how it goes on and passes the client's signals to it.

It is a fork of the stage whose modules the program gets, and needs neither that stage nor the server any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from torch_testing_ext._process import reaping, system

from . import handover

_WOKEN_BY = (signal.SIGCHLD, signal.SIGIO)


def keep(client: socket.socket, close_its: Callable[[], object], leads: bool, adopts: bool) -> None:
    """Fork the program when the client asks for it, and keep it until it ends. Returns in the program alone.

    `close_its` closes, in the keeper, the descriptors of the program. `leads`: the program leads its process group.
    `adopts`: what the program leaves running is killed.
    """
    client.setblocking(True)  # the server has set a time limit, which all processes of the connection share
    _tell(client, ready=True)
    if "go" not in _next_order(client):  # the client has given up, and runs it by itself
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.setpgid(0, 0)  # its parent is in the same session, so the group can be stopped
    if adopts:
        system.adopt_orphans()
    for number in _WOKEN_BY:
        signal.signal(number, lambda number, frame: None)
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        for number in _WOKEN_BY:
            signal.signal(number, signal.SIG_DFL)
        if leads:
            os.setpgid(0, 0)
        client.close()
        system.die_with(keeper, signal.SIGKILL)
        return
    try:
        _tell(client, begun=True)
        close_its()
        handover.signal_news(client)
        _watch(client, pid, pid if leads else keeper)
        if adopts:
            reaping.end_children()
    finally:
        os._exit(0)


def _watch(client: socket.socket, pid: int, group: int) -> None:
    while True:
        while order := _next_order(client):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(-group if order.get("group") else pid, order["signal"])
            if "gone" in order:
                break
        ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if ended and os.WIFSTOPPED(status):
            _tell(client, stopped=True)
        elif ended:
            return _tell(client, ended=status)
        signal.sigwait(_WOKEN_BY)


def _next_order(client: socket.socket) -> dict[str, Any]:
    """The next order of the client; none if there is none yet. If the client is gone, its program is killed."""
    try:
        return handover.receive(client)[0]
    except BlockingIOError:
        return {}
    except (EOFError, OSError):
        return {"signal": signal.SIGKILL, "gone": True}


def _tell(client: socket.socket, **news: Any) -> None:
    with contextlib.suppress(OSError):
        handover.send(client, news)
