"""The keeper of one program: its parent, which tells the client how it goes on and passes the client's signals to it.

It is a fork of the stage whose modules the program gets, and needs neither that stage nor the server any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable

from torch_testing_ext._process import reaping, system

from . import handover
from .handover import BeginProgram, Message, ProgramBegun, ProgramEnded, ProgramReady, ProgramStopped, SendSignal

_WOKEN_BY = (signal.SIGCHLD, signal.SIGIO)


def keep(client: socket.socket, close_its: Callable[[], object], leads: bool, adopts: bool) -> None:
    """Fork the program when the client asks for it, and keep it until it ends. Returns in the program alone.

    `close_its` closes, in the keeper, the descriptors of the program. `leads`: the program leads its process group.
    `adopts`: what the program leaves running is killed.
    """
    # The server has set a time limit, which all processes of the connection share.
    client.setblocking(True)
    _tell(client, ProgramReady())
    if not _is_to_begin(client):
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # Its parent is in the same session, so the group can be stopped.
    os.setpgid(0, 0)
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
        _tell(client, ProgramBegun())
        close_its()
        handover.signal_news(client)
        _watch(client, pid, pid if leads else keeper)
        if adopts:
            reaping.end_children()
    finally:
        os._exit(0)


def _is_to_begin(client: socket.socket) -> bool:
    """Wait for the client's order. It may give up, and run the program by itself."""
    try:
        order, _ = handover.receive(client)
    except (EOFError, OSError, ValueError):
        return False
    return isinstance(order, BeginProgram)


def _watch(client: socket.socket, pid: int, group: int) -> None:
    """Obey the client, and tell it of the program, until that ends."""
    while True:
        _obey(client, pid, group)
        ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if ended and os.WIFSTOPPED(status):
            _tell(client, ProgramStopped())
        elif ended:
            _tell(client, ProgramEnded(status))
            return
        signal.sigwait(_WOKEN_BY)


def _obey(client: socket.socket, pid: int, group: int) -> None:
    """Send the program the signals for which the client has asked by now. If the client is gone, kill it."""
    while True:
        try:
            order, _ = handover.receive(client)
        except BlockingIOError:
            return
        except (EOFError, OSError, ValueError):
            _kill(pid, signal.SIGKILL)
            return
        if isinstance(order, SendSignal):
            _kill(-group if order.to_group else pid, order.number)


def _kill(target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(target, number)


def _tell(client: socket.socket, news: Message) -> None:
    with contextlib.suppress(OSError):
        handover.send(client, news)
