"""The children that a client has requested of a host of forks."""

from collections.abc import Callable
from functools import partial
from typing import Any

from .channels import Channel
from .event_loop import EventLoop

# A function that is called when a child has ended, with a description of how it ended.
Gone = Callable[[str], object]


class RequestedChildren:
    """The children that a client has requested of a host, by number, until it learns that they have ended."""

    def __init__(self, loop: EventLoop):
        """`loop`: the client's."""
        self._loop = loop
        self._gone: dict[int, Gone] = {}

    def request(self, number: int, gone: Gone, channel: Channel[Any], message: Any, *fds: int) -> None:
        """Send the host a request. `gone` is called at the end of the child, never before this method has returned."""
        self._gone[number] = gone
        try:
            channel.send(message, *fds)
        except OSError as error:
            self._loop.after(0.0, partial(self._gone.pop(number), f"could not be started: {error}"))

    def __len__(self) -> int:
        return len(self._gone)

    def forget(self, number: int) -> bool:
        """Stop waiting for the end of a child. Returns False if it has ended already."""
        return self._gone.pop(number, None) is not None

    def on_end(self, number: int, how: str) -> None:
        """The child has ended: tell the caller that waits for it, if there is one."""
        gone = self._gone.pop(number, None)
        if gone is not None:
            gone(how)

    def take_all(self) -> list[Gone]:
        """The host is lost, and all children with it: return what is to be called, and wait for none of them."""
        lost = [*self._gone.values()]
        self._gone.clear()
        return lost
