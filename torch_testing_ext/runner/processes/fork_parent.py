"""The common base of the zygote and of the process of a file: a process that forks others on request.

One thread, one loop, no timers. It adopts the processes that its children leave behind when they are killed, and ends
them; it ends all of its children when its client is gone.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, NoReturn, TypeVar

from torch_testing_ext._process import child, reaping, signals, system
from torch_testing_ext._process.channel import Channel
from torch_testing_ext._process.loop import ParentLoop
from torch_testing_ext._process.signals import signal_group

from . import nanny
from .worker_messages import ChildGone, Kill, StartUnit

Received = TypeVar("Received")


class ForkParent(Generic[Received]):
    """Forks children, which its client numbers, and reports their ends."""

    def __init__(self, channel: Channel[Received], kept: frozenset[int] = frozenset()):
        self.channel = channel
        # Children that live until this process ends.
        self._kept = kept
        # By pid, the numbers that the client gave.
        self._children: dict[int, int] = {}
        self._loop = ParentLoop(self._reap_children)

    def serve(self) -> None:
        """Serve until SIGTERM arrives or the client is gone."""
        try:
            self._loop.serve(self.channel, self._receive, self._loop.stop)
            self._loop.run()
        finally:
            self._end_all()

    def on_message(self, message: Received) -> None:
        """Handle a request of the client, except Kill."""
        raise NotImplementedError

    def start_unit(self, message: StartUnit, start: nanny.Start) -> None:
        """Fork the nanny of a unit."""
        try:
            self.fork(message.number, partial(nanny.run_and_exit, message, start))
        finally:
            for fd in message.fds:
                os.close(fd)

    def fork(self, number: int, run: Callable[[], NoReturn]) -> None:
        """Fork a child without this process's channel and signal handlers. Its end is reported as ChildGone."""

        def begin() -> None:
            self._loop.abandon()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            system.adopt_orphans()
            self.channel.close()
            signals.unblock()
            run()

        # SIGTERM rather than SIGKILL: the child may have processes to end first.
        self._children[child.fork_child(begin, killed_by=signal.SIGTERM)] = number

    def _receive(self, message: Received) -> None:
        """Handle a request. If the system refuses it (a full disk, too many processes), this process lives on."""
        if isinstance(message, Kill):
            for pid in [pid for pid, number in self._children.items() if number == message.number]:
                signal_group(pid, signal.SIGKILL)
            return
        try:
            self.on_message(message)
        except OSError as error:
            number = getattr(message, "number", None)
            if number is not None:
                self.channel.send(ChildGone(number, 0, f"could not be started: {error}"))

    def _reap_children(self) -> None:
        ended = list(reaping.reap())
        reaping.end_children(self._children.keys() | self._kept)
        for pid, status in ended:
            if pid in self._children:
                self.channel.send(ChildGone(self._children.pop(pid), status))

    def _end_all(self) -> None:
        """End all children. They end their own processes; this process kills the rest."""
        for pid in self._children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in self._children:
            reaping.wait_for_exit(pid)
        reaping.end_children()
