"""This process as one of the ranks that a launcher has started.

For each test, a rank begins a round, runs the test, and ends the round with its account. The coordinator waits for all,
judges, and tells every rank the same verdict. It sees at once when a process ends, by its connection. A rank that does
not come to the end of a round, since it waits for another, is ended with its process: nothing else ends a collective.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.stacks import stacks_of_this_process
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch import rank_collectives
from torch_testing_ext.launch.accounts import RankAccount, now
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.launched.coordinator import Coordinator
from torch_testing_ext.launch.launched.meeting import CoordinatorAddress, WrongRound, connect
from torch_testing_ext.launch.launched.round_messages import (
    AskForStacks,
    FromCoordinator,
    FromRank,
    RankBegins,
    RankEnds,
    RankHeard,
    RankJoined,
    RankStacks,
    RankTells,
    Round,
    RoundJudged,
    RoundRefused,
)
from torch_testing_ext.launch.launched.rounds import HAS_LEFT
from torch_testing_ext.launch.launched_by import Launched, this_launch
from torch_testing_ext.launch.verdict import Case, Verdict

# A test gets this long to return, once the verdict is known.
_GRACE_AFTER_VERDICT = 0.5
# A session gets this long to write its report files if a test does not return.
_LONGEST_REPORT = 20.0
# At the end, rank 0 waits this long for a rank that has had no test with the others.
_LONGEST_JOIN = 15.0
_PAUSE = 0.05
# Where the threads are at home that the stacks of a test leave out.
_FOLDER = os.path.dirname(__file__)


class Member:
    """This process as one of the ranks: the main thread begins and ends rounds, another one hears the coordinator."""

    _current: ClassVar[Member | None] = None
    # The reason why this process has not met the others: later tests do not wait for them once more.
    _why_not_met: ClassVar[str] = ""
    # Reports, in any thread, that the test of this process does not return, and ends the session; the process follows.
    report_end: ClassVar[Callable[..., None] | None] = None

    @classmethod
    def of_this_process(cls) -> Member:
        """This process as a rank of its launch. Raises WrongRound."""
        launched = this_launch()
        assert launched is not None
        if cls._why_not_met:
            raise WrongRound(cls._why_not_met)
        if cls._current is None:
            try:
                cls._current = Member(launched)
            except WrongRound as error:
                cls._why_not_met = str(error)
                raise
        return cls._current

    @classmethod
    def is_ending(cls) -> bool:
        """Whether the launcher has asked this process to end."""
        return cls._current is not None and cls._current._is_ending

    @classmethod
    def lacks_rank_0(cls) -> bool:
        """Whether this process has not met rank 0, or that process has ended before its session did."""
        if cls._why_not_met:
            return True
        return cls._current is not None and cls._current.is_alone and not cls._current._was_heard

    def __init__(self, launched: Launched):
        self.rank = launched.rank
        self.world_size = launched.world_size
        self._launched = launched
        self._pid = os.getpid()
        connection, address, self._coordinator = _connection(launched)
        self._channel: Channel[FromCoordinator] = Channel(connection, FromCoordinator)
        self._sending = threading.Lock()
        # The end of this process must close the connection.
        os.register_at_fork(after_in_child=self._channel.close)
        self._send(RankJoined(self.rank, address.token))
        self._inbox: queue.SimpleQueue[FromCoordinator | None] = queue.SimpleQueue()
        self._in_test = False
        self._is_ending = False
        self._is_left = False
        self._was_heard = False
        # Rank 0 is gone.
        self.is_alone = False
        # The latest round.
        self.judged: RoundJudged | None = None
        signal.signal(signal.SIGTERM, self._on_sigterm)
        threading.Thread(target=self._listen, name="torch_testing_ext rank", daemon=True).start()

    def _on_sigterm(self, number: int, frame: Any) -> None:
        """A launcher ends all ranks when one has died: only after the verdict on their test."""
        if not self._is_ending and (self._in_test or Member.report_end is not None):
            self._is_ending = True
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def begin(self, case: Case, directory: str, timeout: float | None, may_differ: bool, sanitize: Sanitize) -> Round:
        """Wait until every rank begins this test. Raises WrongRound if one begins another test or has left."""
        self._in_test = True
        self._send(RankBegins(case, directory, timeout, may_differ, sanitize))
        answer = self._next()
        if isinstance(answer, Round):
            rank_collectives.begin_first_task()
            if os.path.isdir(answer.directory):
                return answer
            # Another machine, which does not have rank 0's.
            return replace(answer, directory=directory)
        self._in_test = False
        if isinstance(answer, RoundRefused):
            raise WrongRound(answer.message)
        raise WrongRound(self._rank_0_was_lost())

    def end(self, of: Round, account: RankAccount) -> Verdict:
        """Tell how the test ended here, and wait for the verdict on all ranks."""
        if os.getpid() != self._pid:
            # A child that the test has forked does not speak for the rank.
            os._exit(1)
        self._send(RankEnds(of.number, account))
        answer = self._next()
        # Too late: another thread ends this process.
        while self._is_left:
            time.sleep(_PAUSE)
        self._in_test = False
        if not isinstance(answer, RoundJudged):
            verdict = Verdict(TestOutcome.CRASHED, self._rank_0_was_lost(), 0)
            answer = RoundJudged(verdict, (), (), is_deadlocked=False)
        self.judged = answer
        return answer.verdict

    def tell(self, reports: tuple[str, ...], timeout: float) -> bool:
        """At the end of all tests: leave these reports to rank 0, and wait until it has finished them, too.

        Returns whether rank 0 tells them.
        """
        self._send(RankTells(reports))
        until = now() + timeout
        while not (self._was_heard or self.is_alone or self._is_ending) and now() < until:
            time.sleep(_PAUSE)
        return self._was_heard

    def hear(self, timeout: float) -> dict[int, tuple[str, ...]]:
        """In rank 0, at the end of all tests: wait for the reports that other ranks leave to it, and return them."""
        assert self._coordinator is not None
        self._send(RankTells(()))
        began = now()
        until_joined = began + min(timeout, _LONGEST_JOIN)
        while not self._is_ending:
            joined, missing = self._coordinator.awaited()
            waits_for_joined = joined and now() < began + timeout
            waits_for_missing = missing and now() < until_joined
            if not waits_for_joined and not waits_for_missing:
                break
            time.sleep(_PAUSE)
        return self._coordinator.take_over()

    def _send(self, message: FromRank) -> None:
        with suppress(OSError), self._sending:
            self._channel.send(message)

    def _next(self) -> FromCoordinator | None:
        """The coordinator's next answer; None if it is gone."""
        answer = self._inbox.get()
        if answer is None:
            # For the next call, too. What had come before is in the inbox before it, however late it is taken.
            self._inbox.put(None)
        return answer

    def _rank_0_was_lost(self) -> str:
        return f"rank 0 of {self.world_size} was lost: {HAS_LEFT}"

    # -- the other thread

    def _listen(self) -> None:
        """Pass on what the coordinator says. Ends this process if its test does not return although it should."""
        while not self.is_alone:
            try:
                for message in self._channel.receive():
                    self._on_message(message)
            except (EOFError, OSError):
                self.is_alone = True
                self._inbox.put(None)
                why = self._rank_0_was_lost()
                self._leave_unless_the_test_returns(Verdict(TestOutcome.CRASHED, why, 0), f"rank {self.rank}: {why}")

    def _on_message(self, message: FromCoordinator) -> None:
        if isinstance(message, AskForStacks):
            self._send(RankStacks(_stacks(), _collectives()))
            return
        self._was_heard = self._was_heard or isinstance(message, RankHeard)
        self._inbox.put(message)
        if isinstance(message, RoundJudged) and message.is_deadlocked:
            # The coordinator has said why.
            self._leave_unless_the_test_returns(message.verdict, "")

    def _leave_unless_the_test_returns(self, verdict: Verdict, why: str) -> None:
        until = now() + _GRACE_AFTER_VERDICT
        while self._in_test and now() < until:
            time.sleep(0.01)
        if self._in_test:
            self._is_left = True
            if Member.report_end is not None:
                reporting = threading.Thread(target=Member.report_end, args=(verdict,), daemon=True)
                reporting.start()
                reporting.join(_LONGEST_REPORT)
            self._launched.abandon(why)


def _connection(launched: Launched) -> tuple[socket.socket, CoordinatorAddress, Coordinator | None]:
    """Return the connection to the coordinator, its address, and in rank 0, which makes it, the coordinator."""
    if launched.rank > 0:
        return *connect(launched), None
    ours, theirs = socket.socketpair()
    own_coordinator = Coordinator(launched, theirs, is_reported=Member.report_end is not None)
    os.register_at_fork(after_in_child=own_coordinator.forget)
    own_coordinator.start()
    return ours, own_coordinator.address, own_coordinator


def _stacks() -> str:
    threads = stacks_of_this_process().split("\n\n")
    return "\n\n".join(thread for thread in threads if _FOLDER not in thread)


def _collectives() -> bytes:
    # In the middle of a test: better without than no stacks.
    with suppress(Exception):
        return rank_collectives.collectives_of_test()
    return b""
