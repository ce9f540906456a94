"""The common base of the zygote and of the process of a file: a process that forks others on request.

One thread, one loop, no timers. It adopts the processes that its children leave behind when they are killed, and ends
them; it ends all of its children when its client is gone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar

from torch_testing_ext._process import child, reaping, signals, system
from torch_testing_ext._process.channel import Channel
from torch_testing_ext._process.loop import ParentLoop
from torch_testing_ext._process.signals import signal_group

from .worker_messages import ChildGone, Kill

Received = TypeVar("Received")


class ForkParent(Generic[Received]):
    """Forks children, which its client numbers, and reports their ends."""

    def __init__(self, channel: Channel[Received], kept: frozenset[int] = frozenset()):
        self.channel = channel
        self._kept = kept  # children that live until this process ends
        # By pid, the number that the client gave; None while the child waits for work.
        self._children: dict[int, int | None] = {}
        self._loop = ParentLoop(self._reap_children)

    def serve(self) -> None:
        """Serve until SIGTERM arrives or the client is gone."""
        try:
            self._loop.listen(self.channel, self._receive)
            self._loop.run()
        finally:
            self._end_all()

    def on_message(self, message: Received) -> None:
        """Handle a request of the client, except Kill."""
        raise NotImplementedError

    def on_child_gone(self, pid: int) -> None:
        """Called when a child has ended, before that is reported."""

    def fork(self, number: int, run: Callable[[], NoReturn]) -> int:
        """Fork a child without this process's channel and signal handlers. Its end is reported as ChildGone."""

        def begin() -> None:
            self._loop.abandon()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            system.adopt_orphans()
            self.channel.close()
            signals.unblock()
            run()

        # SIGTERM rather than SIGKILL: the child may have processes to end first.
        pid = child.fork_child(begin, killed_by=signal.SIGTERM)
        self._children[pid] = number
        return pid

    def _receive(self) -> None:
        try:
            messages = self.channel.receive()
        except EOFError:
            self._loop.stop()
            return
        for message in messages:
            if isinstance(message, Kill):
                self._kill(message.number)
            else:
                self._serve(message)

    def _serve(self, message: Received) -> None:
        """Handle a request. If the system refuses it (a full disk, too many processes), this process lives on."""
        try:
            self.on_message(message)
        except OSError as error:
            number = getattr(message, "number", None)
            if number is not None:
                self.channel.send(ChildGone(number, 0, f"could not be started: {error}"))

    def _kill(self, number: int) -> None:
        for pid, given in self._children.items():
            if given == number:
                signal_group(pid, signal.SIGKILL)

    def _reap_children(self) -> None:
        ended = list(reaping.reap())
        reaping.end_children(self._children.keys() | self._kept)
        for pid, status in ended:
            if pid in self._children:
                self.on_child_gone(pid)
                if (number := self._children.pop(pid)) is not None:
                    self.channel.send(ChildGone(number, status))

    def _end_all(self) -> None:
        """End all children. They end their own processes; this process kills the rest."""
        for pid in self._children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in self._children:
            reaping.wait_for_exit(pid)
        reaping.end_children()


def close_all(*ends: Channel[Any]) -> None:
    """Close the channel ends that belong to a child."""
    for end in ends:
        end.close()
