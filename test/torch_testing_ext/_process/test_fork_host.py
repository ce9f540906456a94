"""Tests a host of forks: the ends that it reports, what its children leave, and the loss of its client."""

from __future__ import annotations

import os
import signal
import subprocess
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from torch_testing_ext._process import sessions, signals, system
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.ends import wait_for_exit, wait_until_gone
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.fork_host import Child, Exit, ForkHost
from torch_testing_ext._process.requested_children import RequestedChildren
from torch_testing_ext._process.signals import signal_group
from torch_testing_ext.common_utils import run_tests


@dataclass(frozen=True)
class Begin:
    """Start a child that exits with this code, or sleeps; before that, it may start a process that it leaves."""

    number: int
    code: int | None = None
    leaves: bool = False


@dataclass(frozen=True)
class KillAll:
    """Kill the children with this number."""

    number: int


@dataclass(frozen=True)
class Begun:
    """A child has started."""

    pid: int


@dataclass(frozen=True)
class Over:
    """A child has ended."""

    number: int
    end: Exit


def be_child(message: Begin) -> NoReturn:
    sessions.detach(None)
    signals.unblock()
    if message.leaves:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    while message.code is None:
        signal.pause()
    os._exit(message.code)


class Sleepers(ForkHost[Begin | KillAll, Child]):
    """A host whose children do what they are told."""

    def on_message(self, message: Begin | KillAll) -> None:
        if isinstance(message, KillAll):
            self.signal_children(message.number, signal.SIGKILL)
            return
        pid = self.fork(partial(be_child, message))
        self.children[pid] = Child(message.number, pid)
        self.client.send(Begun(pid))

    def on_end(self, child: Child, end: Exit) -> None:
        self.client.send(Over(child.number, end))

    def kill_leftovers(self, child: Child, left: list[int]) -> Sequence[int]:
        for pid in left:
            signal_group(pid, signal.SIGKILL)
        wait_until_gone(left)
        return ()


class TestForkHost(unittest.TestCase):
    def setUp(self) -> None:
        ours, theirs = socket_pair()
        self.channel: Channel[Begun | Over] = Channel(ours, Begun | Over)
        self.addCleanup(self.channel.close)

        def serve() -> NoReturn:
            ours.close()
            system.adopt_orphans()
            Sleepers(Channel(theirs, Begin | KillAll)).serve()
            os._exit(0)

        self.host = sessions.fork_child(serve, killed_by=signal.SIGTERM)
        self.addCleanup(wait_for_exit, self.host)
        self.addCleanup(signal_group, self.host, signal.SIGTERM)
        theirs.close()

    def receive(self, count: int) -> list[Begun | Over]:
        received: list[Begun | Over] = []
        while len(received) < count:
            received += self.channel.receive()
        return received

    def test_the_end_of_a_child_is_reported_with_what_it_left(self) -> None:
        self.channel.send(Begin(5, code=3, leaves=True))
        begun, over = self.receive(2)
        assert isinstance(begun, Begun) and isinstance(over, Over)
        self.assertEqual((over.number, over.end.code), (5, 3))
        (leftover,) = over.end.leftovers
        self.assertRegex(leftover, r"^pid \d+: sleep 1000$")
        self.assertEqual(system.children(self.host), [])

    def test_children_with_one_number_are_signalled_together(self) -> None:
        for number in (1, 2, 1):
            self.channel.send(Begin(number))
        self.receive(3)
        self.channel.send(KillAll(1))
        ends = [(over.number, over.end.code) for over in self.receive(2) if isinstance(over, Over)]
        self.assertEqual(ends, [(1, -signal.SIGKILL)] * 2)
        self.assertEqual(len(system.children(self.host)), 1)

    def test_all_ends_with_the_client(self) -> None:
        self.channel.send(Begin(1, leaves=True))
        (begun,) = self.receive(1)
        assert isinstance(begun, Begun)
        self.channel.close()
        self.assertEqual(wait_for_exit(self.host), 0)
        self.assertFalse(os.path.exists(f"/proc/{begun.pid}"))


class TestRequestedChildren(unittest.TestCase):
    def setUp(self) -> None:
        ours, theirs = socket_pair()
        self.channel: Channel[Begun] = Channel(ours, Begun)
        self.theirs: Channel[Begin] = Channel(theirs, Begin)
        self.loop = EventLoop()
        for close in (self.channel.close, self.theirs.close, self.loop.close):
            self.addCleanup(close)
        self.children = RequestedChildren(self.loop)
        self.ends: list[str] = []

    def gone(self, name: str) -> Callable[[str], object]:
        return lambda how: self.ends.append(f"{name} {how}")

    def test_each_end_is_passed_on_once(self) -> None:
        self.children.request(7, self.gone("seven"), self.channel, Begin(7))
        self.assertEqual(self.theirs.receive(), [Begin(7)])
        for number in (8, 7, 7):
            self.children.on_end(number, "ended")
        self.assertEqual(self.ends, ["seven ended"])
        self.assertFalse(self.children.forget(7))

    def test_a_child_that_nobody_waits_for_any_more(self) -> None:
        self.children.request(7, self.gone("seven"), self.channel, Begin(7))
        self.assertTrue(self.children.forget(7))
        self.children.on_end(7, "ended")
        self.assertEqual(self.ends, [])

    def test_all_are_lost_with_their_host(self) -> None:
        for number in (1, 2):
            self.children.request(number, self.gone(str(number)), self.channel, Begin(number))
        for gone in self.children.take_all():
            gone("was lost")
        self.children.on_end(1, "ended")
        self.assertEqual(self.ends, ["1 was lost", "2 was lost"])

    def test_a_request_that_cannot_be_sent(self) -> None:
        self.channel.close()
        self.children.request(7, self.gone("seven"), self.channel, Begin(7))
        self.assertEqual(self.ends, [])
        self.loop.step()
        self.assertEqual(self.ends, ["seven could not be started: [Errno 9] Bad file descriptor"])
        self.assertEqual(self.children.take_all(), [])


if __name__ == "__main__":
    run_tests()
