"""Tests that messages between processes arrive as they were sent, with their descriptors; and the end of channels."""

from __future__ import annotations

import enum
import json
import os
import socket
import unittest
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process import messages
from torch_testing_ext._process.channels import Channel, WithDescriptors, socket_pair
from torch_testing_ext.common_utils import run_tests


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    path: Path
    colour: Colour


@dataclass(frozen=True)
class Everything:
    number: int
    share: float
    text: str
    data: bytes
    flag: bool
    nothing: str | None
    something: Inner | None
    inner: Inner
    many: tuple[Inner, ...]
    pair: tuple[int, Path]
    table: Mapping[str, Inner]
    group: frozenset[int | str]
    message: str = "a field may have any name"
    kind: int = 3


@dataclass(frozen=True)
class Files(WithDescriptors):
    name: str


@dataclass(frozen=True)
class Unexpected:
    """A message that these channels do not receive."""


Received = Everything | Files

INNER = Inner(Path("/a b/\udc80"), Colour.RED)
EVERYTHING = Everything(
    number=-1,
    share=0.1,
    text="line\nwith \0, \u4e16 and \udcff",
    data=bytes(range(256)),
    flag=True,
    nothing=None,
    something=INNER,
    inner=INNER,
    many=(INNER, INNER),
    pair=(2, Path("x")),
    table={"a": INNER},
    group=frozenset({3, "b"}),
)


class TestLineBuffer(unittest.TestCase):
    def test_any_pieces(self) -> None:
        stream = b"one\n\ntwo\nthree"
        for size in range(1, len(stream) + 1):
            lines = messages.LineBuffer()
            found = [line for at in range(0, len(stream), size) for line in lines.add(stream[at : at + size])]
            self.assertEqual(found, [b"one", b"", b"two"], size)
            self.assertEqual(lines.add(b"!\n"), [b"three!"])


class TestMessages(unittest.TestCase):
    def test_round_trip(self) -> None:
        line = messages.to_json(EVERYTHING)
        self.assertNotIn("\n", line)
        self.assertEqual(messages.from_json(line, messages.by_name(Received)), EVERYTHING)

    def test_one_type_instead_of_a_union(self) -> None:
        self.assertEqual(messages.by_name(Files), {"Files": Files})

    def test_a_type_that_is_not_expected(self) -> None:
        with self.assertRaises(KeyError):
            messages.from_json(messages.to_json(Unexpected()), messages.by_name(Received))

    def test_other_programs_can_read_it(self) -> None:
        self.assertEqual(json.loads(messages.to_json(Files("x"))), {"Files": {"name": "x", "fds": []}})


class TestChannel(unittest.TestCase):
    def setUp(self) -> None:
        self.here, self.there = (Channel[Received](end, Received) for end in socket_pair())
        self.addCleanup(self.here.close)
        self.addCleanup(self.there.close)

    def test_messages_in_order(self) -> None:
        self.here.send(EVERYTHING)
        self.here.send(Files("second"))
        self.assertEqual(self.there.receive_available(), [EVERYTHING, Files("second")])
        self.assertEqual(self.there.receive_available(), [])

    def test_a_message_in_pieces(self) -> None:
        line = messages.to_json(EVERYTHING).encode() + b"\n"
        sender, receiver = socket_pair()
        channel: Channel[Received] = Channel(receiver, Received)
        with sender:
            sender.sendall(line[:10])
            self.assertEqual(channel.receive(), [])
            sender.sendall(line[10:] + line[:5])
            self.assertEqual(channel.receive(), [EVERYTHING])
        channel.close()

    def test_a_large_message(self) -> None:
        large = Files("x" * 1_000_000)
        pid = os.fork()
        if pid == 0:
            self.here.send(large)
            os._exit(0)
        received: list[Received] = []
        while not received:
            received = self.there.receive()
        os.waitpid(pid, 0)
        self.assertEqual(received, [large])

    def test_descriptors_go_with_their_message(self) -> None:
        first, second = os.pipe()
        self.here.send(Files("without"))
        self.here.send(Files("both"), first, second)
        without, both = self.there.receive_available()
        assert isinstance(without, Files) and isinstance(both, Files)
        self.assertEqual((without.fds, len(both.fds)), ((), 2))
        os.write(both.fds[1], b"through")
        self.assertEqual(os.read(first, 7), b"through")
        self.assertFalse(os.get_inheritable(both.fds[0]))
        for fd in (first, second, *both.fds):
            os.close(fd)

    def test_many_descriptors(self) -> None:
        """Those of the locks of all devices of a large machine."""
        with open(os.devnull) as null:
            self.here.send(Files("many"), *[null.fileno()] * 200)
        (received,) = self.there.receive_available()
        assert isinstance(received, Files)
        self.assertEqual(len(set(received.fds)), 200)
        for fd in received.fds:
            os.close(fd)

    def test_the_other_end_is_gone(self) -> None:
        self.there.send(Files("last words"))
        self.there.close()
        self.here.send(Files("not received"))
        self.assertEqual(self.here.receive(), [Files("last words")])
        with self.assertRaises(EOFError):
            self.here.receive()
        self.assertEqual(self.here.receive_available(), [])


class TestSocketPair(unittest.TestCase):
    def test_not_on_the_standard_descriptors(self) -> None:
        """If this process has closed them, a later print would write into the connection."""
        kept = os.dup(0)
        os.close(0)
        try:
            ends = socket_pair()
            self.assertTrue(all(end.fileno() > 2 for end in ends))
            for end in ends:
                end.close()
            self.assertRaises(OSError, os.fstat, 0)
        finally:
            os.dup2(kept, 0)
            os.close(kept)

    def test_they_are_connected(self) -> None:
        one, other = socket_pair()
        with one, other:
            one.sendall(b"x")
            self.assertEqual(other.recv(1), b"x")
            self.assertIs(one.family, socket.AF_UNIX)


if __name__ == "__main__":
    run_tests()
