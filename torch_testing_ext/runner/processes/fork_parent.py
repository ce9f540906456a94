"""A process that forks others on request: what the zygote and a file's process have in common.

One thread, one loop, no clock. It adopts what its children leave behind when they are killed, and ends it; it ends
all of it when the process that it works for is gone.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Container
from contextlib import suppress
from multiprocessing.connection import wait
from typing import NoReturn

from torch_testing_ext._process import fork_safety, system
from torch_testing_ext._process.channel import Channel, Message
from torch_testing_ext.launch.fork_server import drain, held_back, signal_group, wakeups


class ForkParent:
    def __init__(self, channel: Channel, kept: frozenset[int] = frozenset()):
        self.channel = channel
        self._kept = kept  # children that are not ours to end before we end ourselves
        self.children: dict[int, int] = {}  # by pid the number that our client gave
        self._wakeups: tuple[int, int] = (-1, -1)

    def serve(self) -> None:
        """Until told to end, or until nobody is left who could tell."""
        try:
            with wakeups() as self._wakeups:
                while self._step():
                    pass
        finally:
            self._end_all()

    def obey(self, order: Message) -> None:
        raise NotImplementedError

    def fork(self, number: int, live: Callable[[], NoReturn]) -> None:
        """A child that shares nothing with us that is ours. Its end is told as `gone`."""
        parent = os.getpid()
        with held_back():
            pid = fork_safety.fork()
            if pid == 0:
                self._become_a_child(parent, live)
        self.children[pid] = number

    def _become_a_child(self, parent: int, live: Callable[[], NoReturn]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            # SIGTERM rather than SIGKILL: there may be processes to end first.
            system.die_with(parent, signal.SIGTERM)
            system.adopt_orphans()
            for fd in self._wakeups:
                os.close(fd)
            self.channel.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            live()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _step(self) -> bool:
        ready = wait([self.channel, self._wakeups[0]])  # type: ignore[list-item]
        if self._wakeups[0] in ready:
            if signal.SIGTERM in drain(self._wakeups[0]):
                return False
            self._reap()
        if self.channel in ready:
            return self._listen()
        return True

    def _listen(self) -> bool:
        try:
            orders = self.channel.receive()
        except EOFError:
            return False
        for order in orders:
            if order["order"] == "kill":
                self._kill(order["number"])
            else:
                self.obey(order)
        return True

    def _kill(self, number: int) -> None:
        for pid, given in self.children.items():
            if given == number:
                signal_group(pid, signal.SIGKILL)

    def _reap(self) -> None:
        ended = []
        with suppress(ChildProcessError):
            while (died := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append(died)
        end_others(self.children.keys() | self._kept)
        for pid, status in ended:
            if pid in self.children:
                self.channel.send({"gone": self.children.pop(pid), "status": status})

    def _end_all(self) -> None:
        """Our children know best how to end what they started; what they leave, we end."""
        for pid in self.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in self.children:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        end_others(())


def end_others(known: Container[int]) -> list[str]:
    """End all children of this process but the known ones, and what they leave in their turn. Returns who they were."""
    names = []
    while others := [pid for pid in system.children(os.getpid()) if pid not in known]:
        for pid in others:
            names.append(system.describe(pid))
            signal_group(pid, signal.SIGKILL)
        for pid in others:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return names
