"""The common base of the preloaded server and of the process of a file."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, NoReturn, TypeVar

from torch_testing_ext._process import (
    ends,
    signals,
    system,
)
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.fork_host import Child, Exit, ForkHost

from . import supervisor
from .fork_parent_messages import ChildGone, Kill, StartUnit

Received = TypeVar("Received")


class ForkParent(ForkHost[Received, Child], Generic[Received]):
    """Forks children that have processes of their own to end, and ends what these leave when they are killed."""

    def __init__(self, client: Channel[Received], kept: frozenset[int] = frozenset()):
        super().__init__(client)
        # Children that live until this process ends.
        self._kept = kept

    def on_request(self, message: Received) -> None:
        """Handle a message of the client, except Kill."""
        raise NotImplementedError

    def on_message(self, message: Received) -> None:
        """Handle a message. A request that the system refuses (a full disk, too many processes) fails alone."""
        if isinstance(message, Kill):
            self.signal_children(message.number, signal.SIGKILL)
            return
        try:
            self.on_request(message)
        except OSError as error:
            number = getattr(message, "number", None)
            if number is not None:
                self.client.send(ChildGone(number, 0, f"could not be started: {error}"))

    def on_end(self, child: Child, end: Exit) -> None:
        self.client.send(ChildGone(child.number, end.status))

    def start_unit(self, message: StartUnit, start: supervisor.Start) -> None:
        """Fork the supervisor of a unit."""
        try:
            self.start(message.number, partial(supervisor.run_and_exit, message, start))
        finally:
            for fd in message.fds:
                os.close(fd)

    def start(self, number: int, run: Callable[[], NoReturn]) -> None:
        """Fork a child with default handlers of signals. Its end is reported as ChildGone."""

        def begin() -> NoReturn:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            system.adopt_orphans()
            signals.unblock()
            run()

        # SIGTERM rather than SIGKILL: the child may have processes to end first.
        pid = self.fork(begin, killed_by=signal.SIGTERM)
        self.children[pid] = Child(number, pid)

    def reap_children(self) -> None:
        super().reap_children()
        # Also if no child has ended: an adopted process may have left others.
        self._end_adopted()

    def end_leftovers(self, child: Child, exited: bool) -> tuple[str, ...]:
        """End them at once: a child that has not been killed has ended all of its own."""
        return self._end_adopted()

    def _end_adopted(self) -> tuple[str, ...]:
        return tuple(ends.end_children(self.children.keys() | self._kept))

    def end_all(self) -> None:
        """End all children. They end their own processes; this process kills the rest."""
        for pid in self.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in self.children:
            ends.wait_for_exit(pid)
        super().end_all()
