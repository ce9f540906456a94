"""The coordinator of ranks that a launcher has started: a thread of rank 0 that judges each round."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace

from torch_testing_ext._collectives.records.raw_records import unpack_record
from torch_testing_ext._machine import ports
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext.launch.accounts import RankAccount, now
from torch_testing_ext.launch.jobs import log_of
from torch_testing_ext.launch.launched import peer_messages
from torch_testing_ext.launch.launched.meeting import listen
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
from torch_testing_ext.launch.launched.rounds import HAS_LEFT, Meeting, RoundState
from torch_testing_ext.launch.launched_by import Launched
from torch_testing_ext.launch.logs_of_ranks import Logs
from torch_testing_ext.launch.rank_reports import failed_by_itself
from torch_testing_ext.launch.verdict import Expected, Verdict
from torch_testing_ext.launch.watching.evidence import RankEvidence, with_collectives
from torch_testing_ext.launch.watching.rules import RankWatch, WatchAction

_STACKS_TIMEOUT = 0.5


class Coordinator(threading.Thread):
    """Waits for all ranks, judges each round, and tells the verdict."""

    def __init__(self, launched: Launched, own: socket.socket, is_reported: bool):
        """`is_reported`: this process has a session that reports verdicts, whatever becomes of its test."""
        super().__init__(name="torch_testing_ext coordinator", daemon=True)
        self._launched = launched
        self._is_reported = is_reported
        self._world_size = launched.world_size
        self._listener, self.address, self._store = listen(launched)
        self._loop = EventLoop()
        self._ranks: dict[int, Channel[FromRank]] = {}
        self._stacks: dict[int, RankStacks] = {}
        # What rank 0 is to report for each rank that is at the end of its tests.
        self._last_reports: dict[int, tuple[str, ...]] = {}
        # Ranks for which a round has waited in vain before they have connected.
        self._absent: set[int] = set()
        self._round = RoundState(1, self._world_size, {}, self._last_reports, self._absent)
        # The lease of the round's port.
        self._lease = ExitStack()
        self._own = self._admit(own)
        self._is_closed = False
        # The thread waits for events: the end of this connection is one, whatever has become of those to ranks.
        self._wake, self._woken = socket.socketpair()
        self._loop.listen(self._woken, lambda: None)

    def close(self) -> None:
        """End the thread, its connections and its store: otherwise they live as long as the process."""
        self._is_closed = True
        with suppress(OSError):
            self._wake.shutdown(socket.SHUT_RDWR)
        self.join()
        self.forget()
        self._store = None

    def forget(self) -> None:
        """In a forked child: leave the connections to the process that has the coordinator."""
        for sock in (self._listener, self._wake, self._woken):
            sock.close()
        for channel in (*self._ranks.values(), self._own):
            channel.close()

    def run(self) -> None:
        try:
            self._loop.listen(self._listener, lambda: self._admit(self._listener.accept()[0]))
            # It moves on only when nothing else has happened: what has come in time counts, however late it is read,
            # as while the test of this process keeps the GIL.
            reached = now()
            while not self._is_closed:
                if not self._loop.step(self._proceed(reached)):
                    reached = now()
        except BaseException as error:
            # Without a coordinator, no test can pass.
            self._launched.abandon(f"the results of the ranks cannot be combined: {error!r}")

    # -- connections

    def _admit(self, sock: socket.socket) -> Channel[FromRank]:
        channel: Channel[FromRank] = Channel(sock, FromRank)
        rank: int | None = None

        def receive() -> None:
            nonlocal rank
            try:
                for message in channel.receive():
                    if isinstance(message, RankJoined):
                        # A process that a test has started with our variables, or one that is no rank of this launch.
                        if message.rank in self._ranks or message.token != self.address.token:
                            raise EOFError
                        rank = message.rank
                        self._ranks[rank] = channel
                        self._absent.discard(rank)
                    elif rank is not None:
                        self._on_message(rank, message)
            except Exception as error:
                if rank is not None and not isinstance(error, (EOFError, OSError)):
                    # A stranger may send anything.
                    raise
                self._loop.forget(channel)
                channel.close()
                if rank is not None:
                    self._round.on_leave(rank, now())

        self._loop.listen(channel, receive)
        return channel

    def _on_message(self, rank: int, message: FromRank) -> None:
        match message:
            case RankBegins():
                self._round.on_begin(rank, message, now())
            case RankEnds(number, account):
                self._round.on_end(rank, RankEnds(number, self._by_our_clock(account)))
            case RankStacks():
                self._stacks[rank] = message
            case RankTells(reports):
                self._last_reports[rank] = reports

    def _by_our_clock(self, account: RankAccount) -> RankAccount:
        """Return an account whose times may be of another machine with times of this one: it ended just now."""
        if self._launched.is_one_machine:
            return account
        ahead = now() - account.ended
        return replace(account, started=account.started + ahead, ended=account.ended + ahead)

    def _tell(self, ranks: Iterable[int], message: FromCoordinator) -> None:
        for rank in ranks:
            if rank not in self._round.left:
                with suppress(OSError):
                    # The end of the connection says that the rank has left.
                    self._ranks[rank].send(message)

    def awaited(self) -> tuple[set[int], set[int]]:
        """The ranks that have yet to tell what rank 0 is to report for them: those that have joined, and the others."""
        others = set(range(1, self._world_size)) - self._last_reports.keys() - self._round.left.keys()
        return others & self._ranks.keys(), others - self._ranks.keys()

    def take_over(self) -> dict[int, tuple[str, ...]]:
        """Take over the reports of the other ranks."""
        reports_of_others = {rank: reports for rank, reports in self._last_reports.items() if rank}
        self._tell(self._ranks.keys() - {0}, RankHeard())
        return reports_of_others

    # -- a round

    def _proceed(self, reached: float) -> float | None:
        """Do all that is to be done at the time `reached`. Returns the one at which to ask again if nothing happens."""
        while True:
            if self._round.watch is None:
                meeting = self._round.meeting(reached)
                if meeting is Meeting.INCOMPLETE:
                    return self._round.meeting_ends
                if meeting is Meeting.COMPLETE:
                    self._start()
                else:
                    self._refuse(self._round.why_refused(reached), self._round.is_overdue(reached))
            else:
                step = self._round.watch.step(reached)
                if step.action is WatchAction.WAIT:
                    return step.until
                self._act(step.action, self._round.watch)

    def _act(self, action: WatchAction, watch: RankWatch) -> None:
        match action:
            case WatchAction.NAME_LOST:
                self._name_lost()
                watch.on_named()
            case WatchAction.TAKE_STACKS:
                self._take_stacks(self._round.running)
                watch.on_stacks()
            case WatchAction.JUDGE:
                self._judge(watch.timed_out)
            case _:
                raise AssertionError(action)

    def _refuse(self, why: str, is_overdue: bool) -> None:
        begun = list(self._round.begun)
        if is_overdue:
            self._absent.update(set(range(self._world_size)) - self._ranks.keys())
        if self._absent:
            why = f"{why}. {peer_messages.how_to_unset()}"
        self._next_round()
        self._tell(begun, RoundRefused(why))

    def _next_round(self) -> None:
        self._lease.close()
        number = self._round.number + 1
        self._round = RoundState(number, self._world_size, self._round.left, self._last_reports, self._absent)

    def _start(self) -> None:
        self._round.start(now())
        # An answer of an earlier round: late ones have come before the rank's next message.
        self._stacks.clear()
        first = self._round.begun[0]
        port = self._lease.enter_context(ports.leased_port())
        started = Round(self._round.number, first.directory, self.address.host, port, first.sanitize)
        self._tell(self._round.begun, started)

    def _name_lost(self) -> None:
        """Say at once which ranks have left: the launcher is about to end the other ranks."""
        name = self._round.begun[0].case.name
        for rank in self._round.lost:
            self._launched.say(f"rank {rank} of {self._world_size} was lost in {name}: {HAS_LEFT}")

    def _judge(self, timed_out: bool) -> None:
        """Tell all ranks the verdict, and begin the next round."""
        judged_round = self._round
        # Some may have ended because they were asked for their stacks.
        is_deadlocked = bool(judged_round.running)
        evidence = self._evidence(timed_out)
        verdict = evidence.verdict(judged_round.begun[0].case)
        if is_deadlocked:
            self._announce(verdict)
        self._next_round()
        failed = tuple(report.rank for report in evidence.reports if failed_by_itself(report))
        message = RoundJudged(verdict, failed, judged_round.short_accounts(), is_deadlocked)
        # Rank 0 last: its process has the coordinator.
        self._tell(sorted(judged_round.begun, reverse=True), message)

    def _evidence(self, timed_out: bool) -> RankEvidence:
        first = self._round.begun[0]
        ranks = range(self._world_size)
        logs = Logs([log_of(first.directory, rank) for rank in ranks], first.sanitize)
        reports = [self._round.report(rank, now(), self._stacks) for rank in ranks]
        left = [unpack_record(self._collectives(rank)) for rank in ranks]
        return RankEvidence(
            tuple(with_collectives(reports, logs, left)),
            timed_out,
            Expected(may_differ=first.may_differ),
            note=first.sanitize.note,
        )

    def _announce(self, verdict: Verdict) -> None:
        """Say at once and once why ranks cannot go on: the launcher ends all of them when it sees the first end."""
        text = verdict.message.partition("\n")[0] if self._is_reported else verdict.message
        self._launched.say(f"{text}\n\nThe other ranks cannot continue, so all processes are terminated.")

    def _take_stacks(self, ranks: list[int]) -> None:
        self._tell(ranks, AskForStacks())
        until = now() + _STACKS_TIMEOUT
        while any(rank not in self._stacks for rank in ranks) and self._loop.step(until):
            pass

    def _collectives(self, rank: int) -> bytes:
        """The collectives of a rank: from its account, or from its answer with its stacks."""
        if rank in self._round.accounts:
            return self._round.accounts[rank].collectives
        return self._stacks[rank].collectives if rank in self._stacks else b""
