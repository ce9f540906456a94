"""The hub of ranks that a launcher has started: a thread of rank 0 that waits for all ranks and judges each round.

The ranks meet there by a Unix socket, or by TCP if they are on several machines. Then, rank 0 leaves the address of the
hub in the launcher's store, with a token: the hub hears only connections that begin with it.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch_testing_ext._collectives.raw import unpack
from torch_testing_ext._machine import ports
from torch_testing_ext._process import messages
from torch_testing_ext._process.channel import Channel
from torch_testing_ext._process.loop import EventLoop

from . import rounds
from .accounts import RankAccount
from .job import log_of
from .launchers import Launched
from .rank_evidence import RankEvidence, with_collectives
from .rank_report import now
from .rank_watch import RankWatch, WatchAction
from .sanitizer_logs import Logs
from .verdict import Expected, Verdict, failed_by_itself

# Rank 0 may import more than the others before its first test.
CONNECT_TIMEOUT = 120.0
_STEP = 0.05
_STACKS_TIMEOUT = 0.5


class WrongRound(RuntimeError):
    """The ranks cannot run this test together; the message says why."""


@dataclass(frozen=True)
class HubAddress:
    """The hub's address. `host`: by which ranks reach the machine of rank 0; `port`: 0 for a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""


class Hub(threading.Thread):
    """Waits for all ranks, judges each round, and tells the verdict."""

    def __init__(self, launched: Launched, own: socket.socket, is_reported: bool):
        """`is_reported`: this process has a session that reports verdicts, whatever becomes of its test."""
        super().__init__(name="torch_testing_ext hub", daemon=True)
        self._launched = launched
        self._is_reported = is_reported
        self._world_size = launched.world_size
        self._listener, self.address, self._store = listen(launched)
        self._loop = EventLoop()
        self._ranks: dict[int, Channel[rounds.FromRank]] = {}
        self._stacks: dict[int, rounds.RankStacks] = {}
        # What rank 0 is to report for each rank that is at the end of its tests.
        self._last_reports: dict[int, tuple[str, ...]] = {}
        self._round = rounds.RoundState(1, self._world_size, {}, self._last_reports)
        # The lease of the round's port.
        self._lease = ExitStack()
        self._own = self._admit(own)

    def forget(self) -> None:
        """In a forked child: leave the connections to the process that has the hub."""
        self._listener.close()
        for channel in (*self._ranks.values(), self._own):
            channel.close()

    def run(self) -> None:
        try:
            self._loop.listen(self._listener, lambda: self._admit(self._listener.accept()[0]))
            while True:
                self._loop.step(self._proceed())
        except BaseException as error:
            # Without a hub, no test can pass.
            self._launched.abandon(f"the verdict on all ranks cannot be made: {error!r}")

    # -- connections

    def _admit(self, sock: socket.socket) -> Channel[rounds.FromRank]:
        channel: Channel[rounds.FromRank] = Channel(sock, rounds.FromRank)
        rank: int | None = None

        def receive() -> None:
            nonlocal rank
            try:
                for message in channel.receive():
                    if isinstance(message, rounds.RankJoined):
                        # A process that a test has started with our variables, or one that is no rank of this launch.
                        if message.rank in self._ranks or message.token != self.address.token:
                            raise EOFError
                        rank = message.rank
                        self._ranks[rank] = channel
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

    def _on_message(self, rank: int, message: rounds.FromRank) -> None:
        match message:
            case rounds.RankBegins():
                self._round.on_begin(rank, message, now())
            case rounds.RankEnds(number, account):
                self._round.on_end(rank, rounds.RankEnds(number, self._by_our_clock(account)))
            case rounds.RankStacks():
                self._stacks[rank] = message
            case rounds.RankTells(reports):
                self._last_reports[rank] = reports

    def _by_our_clock(self, account: RankAccount) -> RankAccount:
        """Return an account whose times may be of another machine with times of this one: it ended just now."""
        if self._launched.is_one_machine:
            return account
        ahead = now() - account.ended
        return replace(account, started=account.started + ahead, ended=account.ended + ahead)

    def _tell(self, ranks: Iterable[int], message: rounds.FromHub) -> None:
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
        self._tell(self._ranks.keys() - {0}, rounds.RankHeard())
        return reports_of_others

    # -- a round

    def _proceed(self) -> float | None:
        """Do all that is to be done now. Returns the moment at which to ask again if nothing happens until then."""
        while True:
            if self._round.watch is None:
                meeting = self._round.meeting(now())
                if meeting is rounds.Meeting.INCOMPLETE:
                    return self._round.meeting_ends
                if meeting is rounds.Meeting.COMPLETE:
                    self._start()
                else:
                    self._refuse(self._round.why_refused(now()))
            else:
                step = self._round.watch.step(now())
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

    def _refuse(self, why: str) -> None:
        begun = list(self._round.begun)
        self._next_round()
        self._tell(begun, rounds.RoundRefused(why))

    def _next_round(self) -> None:
        self._lease.close()
        number = self._round.number + 1
        self._round = rounds.RoundState(number, self._world_size, self._round.left, self._last_reports)

    def _start(self) -> None:
        self._round.start(now())
        # Of an earlier round: late answers have come before the rank's next message.
        self._stacks.clear()
        first = self._round.begun[0]
        port = self._lease.enter_context(ports.leased_port())
        started = rounds.Round(self._round.number, first.directory, self.address.host, port, first.sanitize)
        self._tell(self._round.begun, started)

    def _name_lost(self) -> None:
        """Say at once which ranks have left: the launcher is about to end the other ranks."""
        name = self._round.begun[0].case.name
        for rank in self._round.lost:
            self._launched.say(f"rank {rank} of {self._world_size} has left in {name}: {rounds.HAS_LEFT}")

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
        message = rounds.RoundJudged(verdict, failed, judged_round.short_accounts(), is_deadlocked)
        # Rank 0 last: its process has the hub.
        self._tell(sorted(judged_round.begun, reverse=True), message)

    def _evidence(self, timed_out: bool) -> RankEvidence:
        first = self._round.begun[0]
        ranks = range(self._world_size)
        logs = Logs([log_of(first.directory, rank) for rank in ranks], first.sanitize)
        reports = [self._round.report(rank, now(), self._stacks) for rank in ranks]
        left = [unpack(self._collectives(rank)) for rank in ranks]
        return RankEvidence(
            tuple(with_collectives(reports, logs, left)),
            timed_out,
            Expected(may_differ=first.may_differ),
            note=first.sanitize.note,
        )

    def _announce(self, verdict: Verdict) -> None:
        """Say at once and once why ranks cannot go on: the launcher ends all of them when it sees the first end."""
        text = verdict.message.partition("\n")[0] if self._is_reported else verdict.message
        self._launched.say(
            f"{text}\n\nThe ranks that still run cannot go on: their processes are ended, with rank 0's."
        )

    def _take_stacks(self, ranks: list[int]) -> None:
        self._tell(ranks, rounds.AskForStacks())
        until = now() + _STACKS_TIMEOUT
        while any(rank not in self._stacks for rank in ranks) and self._loop.step(until):
            pass

    def _collectives(self, rank: int) -> bytes:
        """The collectives of a rank: from its account, or from its answer with its stacks."""
        if rank in self._round.accounts:
            return self._round.accounts[rank].collectives
        return self._stacks[rank].collectives if rank in self._stacks else b""


# -- the meeting


def listen(launched: Launched) -> tuple[socket.socket, HubAddress, Any]:
    """In rank 0: listen for the other ranks. Raises WrongRound.

    Keep the last thing that it returns: rank 0 may have made the store, which ends with this object.
    """
    store = None
    if launched.is_one_machine:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(launched.address)
        except OSError as error:
            raise WrongRound(f"another process is rank 0 of this launch: {error}") from None
        address = HubAddress()
    else:
        store = _store(launched)
        listener = socket.create_server(("", 0))
        address = HubAddress(_own_host(), listener.getsockname()[1], secrets.token_hex(16))
        store.set(launched.key, messages.to_json(address))
    listener.listen(launched.world_size)
    return listener, address, store


def connect(launched: Launched) -> tuple[socket.socket, HubAddress]:
    """In any other rank: connect with the hub. Raises WrongRound."""
    address = HubAddress() if launched.is_one_machine else _published(launched)
    until = now() + CONNECT_TIMEOUT
    while True:
        try:
            return _connect_once(launched, address), address
        except OSError as error:
            if now() > until:
                raise _not_found(error) from None
        time.sleep(_STEP)


def _connect_once(launched: Launched, address: HubAddress) -> socket.socket:
    if address.port:
        sock = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(launched.address)
    except OSError:
        sock.close()
        raise
    return sock


def _published(launched: Launched) -> HubAddress:
    store = _store(launched)
    try:
        address: HubAddress = messages.from_json(store.get(launched.key), messages.by_name(HubAddress))
        return address
    except RuntimeError as error:
        # For one, torch's DistStoreError.
        raise _not_found(error) from None


def _not_found(error: Exception) -> WrongRound:
    return WrongRound(
        f"rank 0 of this launch was not found within {CONNECT_TIMEOUT:.0f} s ({error}). The variables "
        f"RANK and WORLD_SIZE say that a launcher has started this process; unset them if none has"
    )


def _store(launched: Launched) -> Any:
    from torch_testing_ext import _torch

    if not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise WrongRound(
            "this launch has several machines, whose ranks meet at MASTER_ADDR and MASTER_PORT: torchrun sets these; "
            "with srun or mpirun, set them to the machine of rank 0 and a port that is free there"
        )
    try:
        return _torch.launch.launcher_store(launched.rank, CONNECT_TIMEOUT)
    except RuntimeError as error:
        raise _not_found(error) from None


def _own_host() -> str:
    """The address of rank 0's machine, which need not be that of the store."""
    address = os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # It sends nothing.
        probe.connect((address, int(os.environ["MASTER_PORT"])))
        own = str(probe.getsockname()[0])
    if own.startswith("127."):
        # The address is a name of this machine, which others know by a real address.
        return address
    return own
