"""Tests that what ranks of a launch have said in time counts, however late it is read, as on a loaded machine."""

import queue
import socket
import threading
import time
import unittest
import uuid
from unittest import mock

from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Case, RankEnding, Verdict
from torch_testing_ext.launch.accounts import RankAccount
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.launched import coordinator
from torch_testing_ext.launch.launched.coordinator import Coordinator
from torch_testing_ext.launch.launched.meeting import connect
from torch_testing_ext.launch.launched.member import Member
from torch_testing_ext.launch.launched.round_messages import (
    FromCoordinator,
    RankBegins,
    RankEnds,
    RankJoined,
    Round,
    RoundJudged,
)
from torch_testing_ext.launch.launched_by import Launched

TIMEOUT = 1000.0
BEGINS = RankBegins(Case("test_x"), "/tmp/x", TIMEOUT, False, Sanitize())
JUDGED = RoundJudged(Verdict(TestOutcome.PASSED, "", 0), (), (), is_deadlocked=False)


class CoordinatorTest(unittest.TestCase):
    """The coordinator reads one message, and is then kept until the time is over; another one has come before."""

    def setUp(self) -> None:
        self.seconds_later = 0.0
        self.enterContext(mock.patch.object(coordinator, "now", lambda: time.monotonic() + self.seconds_later))
        launched = Launched(0, 2, is_one_machine=True, local_rank=0, key=uuid.uuid4().hex)
        ours, theirs = socket.socketpair()
        self.coordinator = Coordinator(launched, theirs, is_reported=False)
        self.addCleanup(self.coordinator.close)
        connection, _ = connect(launched)
        self.ranks: list[Channel[FromCoordinator]] = []
        for rank, end in enumerate((ours, connection)):
            end.settimeout(60)
            self.ranks.append(Channel(end, FromCoordinator))
            self.addCleanup(self.ranks[-1].close)
            self.ranks[-1].send(RankJoined(rank, ""))
        self.coordinator.start()

    def keep_after(self, message: object) -> FromCoordinator:
        """Return the answer to this of rank 0. When it has been read, rank 1 says the same, and the time goes by."""
        on_message = Coordinator._on_message

        def on_message_of_rank(self_: Coordinator, rank: int, received: object) -> None:
            on_message(self_, rank, received)  # type: ignore[arg-type]
            if rank == 0:
                self.ranks[1].send(message)
                self.seconds_later += 2 * TIMEOUT

        with mock.patch.object(Coordinator, "_on_message", on_message_of_rank):
            self.ranks[0].send(message)
            (answer,) = self.ranks[0].receive()
        return answer

    def test_the_end_after_its_own_rank_has_left(self) -> None:
        """The thread has seen that, and waits for what comes next, when it is closed."""
        left = threading.Event()

        def forget(self_: EventLoop, source: object) -> None:
            forget_source(self_, source)
            left.set()

        forget_source = EventLoop.forget
        with mock.patch.object(EventLoop, "forget", forget):
            self.ranks[0].close()
            self.assertTrue(left.wait(60))
        step, waits = EventLoop._call_readable, threading.Event()

        def call_readable(self_: EventLoop, seconds: float | None) -> bool:
            waits.set()
            return step(self_, seconds)

        with mock.patch.object(EventLoop, "_call_readable", call_readable):
            self.ranks[1].send(BEGINS)
            self.assertTrue(waits.wait(60))
        self.coordinator.close()
        self.assertFalse(self.coordinator.is_alive())

    def test_the_begin_of_a_test(self) -> None:
        self.assertIsInstance(self.keep_after(BEGINS), Round)

    def test_the_end_of_a_test(self) -> None:
        for rank in self.ranks:
            rank.send(BEGINS)
        self.assertIsInstance(self.ranks[0].receive()[0], Round)
        at = time.monotonic()
        answer = self.keep_after(RankEnds(1, RankAccount(RankEnding.PASSED, at, at)))
        assert isinstance(answer, RoundJudged)
        self.assertIs(answer.verdict.outcome, TestOutcome.PASSED)


class MemberTest(unittest.TestCase):
    def test_a_verdict_before_the_end_of_rank_0(self) -> None:
        """The thread that listens has heard of both when the main thread asks."""
        member = Member.__new__(Member)
        member.rank, member.world_size, member.is_alone = 1, 2, False
        member._was_heard = member._in_test = False
        member._inbox = queue.SimpleQueue()
        member._channel = mock.Mock()
        member._channel.receive.side_effect = [[JUDGED], EOFError]
        member._listen()
        self.assertEqual([member._next() for _ in range(3)], [JUDGED, None, None])


if __name__ == "__main__":
    run_tests()
