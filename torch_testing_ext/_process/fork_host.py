"""A process that forks children on request, reports their ends, and ends what they leave running.

One thread, one loop, no timers. A host adopts the processes that its children leave behind, and ends everything that
it has started when its client is gone. Its subclasses say what a child does, which processes a child leaves, and in
what order they are ended.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from . import ends, sessions, system
from .channels import Channel
from .event_loop import ParentLoop
from .signals import signal_group

Received = TypeVar("Received")


@dataclass(frozen=True)
class Exit:
    """The end of a process as its parent sees it: wait status, time, and descriptions of what it left running."""

    status: int
    at: float
    leftovers: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """Return the exit code as subprocess and multiprocessing give it: negative for a signal."""
        return os.waitstatus_to_exitcode(self.status)


@dataclass(eq=False)
class Child:
    """A child of a host, with the number that the client gave to what it asked for: one child, or several."""

    number: int
    pid: int


SomeChild = TypeVar("SomeChild", bound=Child)


class ForkHost(Generic[Received, SomeChild]):
    """Serves the requests of a client for children."""

    # How long the leftovers of a child that was killed may take to end by themselves. Those of a child that exits have
    # FOR_HELPERS.
    grace_for_orphans = 0.0

    def __init__(self, client: Channel[Received]):
        self.client = client
        # The children that have not been reaped, by pid.
        self.children: dict[int, SomeChild] = {}
        self.loop = ParentLoop(self.reap_children)

    def serve(self) -> None:
        """Serve until SIGTERM arrives, the client is gone, or the loop is stopped; then end all children."""
        try:
            self.loop.serve(self.client, self.on_message, self.on_client_lost)
            self.loop.run()
        finally:
            self.end_all()

    def on_message(self, message: Received) -> None:
        """Do what the client asks for."""
        raise NotImplementedError

    def on_client_lost(self) -> None:
        """End: there is nobody to serve any more."""
        self.loop.stop()

    def on_end(self, child: SomeChild, end: Exit) -> None:
        """Report the end of a child. What it left running has ended, too."""
        raise NotImplementedError

    # -- children

    def fork(self, run: Callable[[], NoReturn], killed_by: int = signal.SIGKILL) -> int:
        """Fork a child, which gets signal `killed_by` when this process dies. Returns its pid."""

        def be_child() -> NoReturn:
            self.close_inherited()
            run()

        return sessions.fork_child(be_child, killed_by)

    def close_inherited(self) -> None:
        """In a new child: leave the connections of the host."""
        self.loop.abandon()
        self.client.close()

    def children_of(self, number: int) -> list[SomeChild]:
        return [child for child in self.children.values() if child.number == number]

    def signal_children(self, number: int, signal_number: int) -> None:
        """Signal the groups of all children with this number that are still running."""
        for child in self.children_of(number):
            signal_group(child.pid, signal_number)

    # -- their ends

    def reap_children(self) -> None:
        """Handle the ends of children. Only the end of one that the client has asked for is reported."""
        for pid, status in ends.reap():
            at = time.monotonic()
            child = self.children.pop(pid, None)
            if child is not None:
                leftovers = self.end_leftovers(child, exited=os.WIFEXITED(status))
                self.on_end(child, Exit(status, at, leftovers))

    def adopted(self) -> list[int]:
        """The processes that have become children of this one, since their parents have ended."""
        return [pid for pid in system.children(os.getpid()) if pid not in self.children]

    def leftovers(self, child: SomeChild) -> list[int]:
        """The processes that a child has left running."""
        return self.adopted()

    def end_leftovers(self, child: SomeChild, exited: bool) -> tuple[str, ...]:
        """End what a child has left running. Returns descriptions of those that should have ended by themselves."""
        left = self.leftovers(child)
        grace = ends.FOR_HELPERS if exited else self.grace_for_orphans
        if left and grace:
            ends.wait_until_gone(left, grace)
            left = self.leftovers(child)
        descriptions = {pid: self.describe(pid) for pid in left if not system.is_ending(pid)}
        for pid in self.kill_leftovers(child, left):
            if pid in descriptions:
                descriptions[pid] += f" ({ends.SIGTERM_DID_NOT_END_IT})"
        return tuple(descriptions.values())

    def describe(self, pid: int) -> str:
        """Describe a process that was left running."""
        return system.describe(pid)

    def kill_leftovers(self, child: SomeChild, left: list[int]) -> Sequence[int]:
        """End what a child has left running. Returns the processes that SIGTERM did not end, if they got it."""
        raise NotImplementedError

    def end_all(self) -> None:
        """End all children and everything that they have started."""
        ends.end_children()
