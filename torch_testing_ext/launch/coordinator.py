"""Ranks that a launcher has started: the coordinator in rank 0, the rounds, the members."""

from __future__ import annotations

import enum
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch_testing_ext._collectives.records.raw_records import unpack_record
from torch_testing_ext._machine import machine_resources
from torch_testing_ext._process import messages
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.stacks import stacks_of_this_process
from torch_testing_ext.launch import hang, peers, rank_collectives
from torch_testing_ext.launch.accounts import RankAccount, RankEnding, now
from torch_testing_ext.launch.jobs import Sanitize, log_of
from torch_testing_ext.launch.watching.evidence import RankEvidence, with_collectives
from torch_testing_ext.launch.watching.rules import LAUNCHED_PROCESSES, RankWatch, WatchAction

from .environment import Launched, this_launch
from .probes import Logs
from .verdict import Case, Expected, Outcome, RankReport, Verdict, failed_by_itself, report_of

# --------------------------------------------------------------------------------------------------------------------
# Rounds: tests that all ranks of a launcher run together. Pure: messages come in, and what to do next comes out.

HAS_LEFT = "its process was killed, crashed or exited"


# -- what a rank says to the coordinator


@dataclass(frozen=True)
class RankJoined:
    """The first message of a connection. `token`: see coordinator.py."""

    rank: int
    token: str


@dataclass(frozen=True)
class RankBegins:
    """The rank is about to run this test."""

    case: Case
    directory: str
    timeout: float | None
    may_differ: bool
    sanitize: Sanitize


@dataclass(frozen=True)
class RankEnds:
    """The test of this round is over in the rank."""

    number: int
    account: RankAccount


@dataclass(frozen=True)
class RankStacks:
    """The rank's stacks, and the collectives that it has issued so far."""

    text: str
    collectives: bytes


@dataclass(frozen=True)
class RankTells:
    """All tests are over in the rank. `reports`: what rank 0 has to tell for it, serialised."""

    reports: tuple[str, ...]


FromRank = RankJoined | RankBegins | RankEnds | RankStacks | RankTells


# -- what the coordinator says to a rank


@dataclass(frozen=True)
class Round:
    """All ranks have begun the test. `directory`, `address` and `port` are for them all."""

    number: int
    directory: str
    # Of the machine of rank 0.
    address: str
    port: int
    sanitize: Sanitize


@dataclass(frozen=True)
class RoundRefused:
    """The ranks cannot run this test together."""

    message: str


@dataclass(frozen=True)
class AskForStacks:
    """The rank is to say where it is."""


@dataclass(frozen=True)
class RoundJudged:
    """The round is over. `failed`: the ranks that failed by themselves.

    `accounts`: of all ranks, without tracebacks and collectives; None for a rank that left none.
    `is_deadlocked`: some ranks cannot go on, and every process whose test does not return ends itself.
    """

    verdict: Verdict
    failed: tuple[int, ...]
    accounts: tuple[RankAccount | None, ...]
    is_deadlocked: bool


@dataclass(frozen=True)
class RankHeard:
    """Rank 0 tells what the rank has told it."""


FromCoordinator = Round | RoundRefused | AskForStacks | RoundJudged | RankHeard


# -- the state of a round


class Meeting(enum.Enum):
    """The state of ranks that are to begin a test together."""

    INCOMPLETE = "some ranks have yet to begin"
    IMPOSSIBLE = "they cannot run a test together"
    COMPLETE = "all ranks have begun the same test"


@dataclass
class RoundState:
    """The messages of the ranks about one round.

    Of any round, `left`: when connections of ranks have closed, `done`: ranks that are at the end of their tests,
    `absent`: ranks that had not connected when the time of an earlier round to begin was over.
    """

    number: int
    world_size: int
    left: dict[int, float]
    done: Container[int] = ()
    absent: Container[int] = ()
    begun: dict[int, RankBegins] = field(default_factory=dict)
    accounts: dict[int, RankAccount] = field(default_factory=dict)
    # When all had begun.
    began: float | None = None
    # Until then, the end of the time that the others get to begin.
    meeting_ends: float | None = None
    # The ranks since then.
    watch: RankWatch | None = None

    # -- events

    def on_begin(self, rank: int, message: RankBegins, now: float) -> None:
        self.begun[rank] = message
        if self.meeting_ends is None and message.timeout is not None:
            self.meeting_ends = now + message.timeout

    def on_end(self, rank: int, message: RankEnds) -> None:
        if message.number != self.number:
            # Late: the verdict is known.
            return
        self.accounts[rank] = message.account
        if self.watch is not None:
            self.watch.on_end(RankReport(rank, message.account.ending), message.account.ended)

    def on_leave(self, rank: int, now: float) -> None:
        """The connection of a rank has closed."""
        if rank in self.left:
            return
        self.left[rank] = now
        if self.watch is not None:
            self._watch_left(self.watch, rank)

    def start(self, now: float) -> None:
        """All ranks have begun: from now on they are watched."""
        self.began = now
        self.watch = RankWatch(self.begun, LAUNCHED_PROCESSES, began=now, timeout=self.begun[0].timeout)
        for rank in self.left:
            self._watch_left(self.watch, rank)

    def _watch_left(self, watch: RankWatch, rank: int) -> None:
        if rank not in self.accounts:
            watch.on_end(RankReport(rank, RankEnding.LOST), self.left[rank])
        watch.on_exit(rank)

    # -- what follows

    @property
    def running(self) -> list[int]:
        """The ranks that have begun, and neither ended the test nor left."""
        return [rank for rank in self.begun if rank not in self.accounts and rank not in self.left]

    @property
    def lost(self) -> list[int]:
        """The ranks that have left without an account."""
        return sorted(rank for rank in self.left if rank not in self.accounts)

    def meeting(self, now: float) -> Meeting:
        """The state of the ranks until all have begun."""
        if not self.begun:
            return Meeting.INCOMPLETE
        if self.why_refused(now):
            return Meeting.IMPOSSIBLE
        return Meeting.COMPLETE if len(self.begun) == self.world_size else Meeting.INCOMPLETE

    def why_refused(self, now: float) -> str:
        """Why the ranks cannot run a test together; "" if they can, as far as is known."""
        names = {rank: message.case.name for rank, message in sorted(self.begun.items())}
        missing = [rank for rank in range(self.world_size) if rank not in self.begun]
        if len(set(names.values())) > 1:
            tests = "; ".join(f"rank {rank} runs {name}" for rank, name in names.items())
            return f"the ranks of the launcher run different tests: {tests}"
        gone = [rank for rank in missing if rank in self.left]
        if gone:
            return f"rank {gone[0]} of {self.world_size} is missing: {HAS_LEFT}"
        done = [rank for rank in missing if rank in self.done]
        if done:
            return f"rank {done[0]} of {self.world_size} has ended its tests (-x, or an error before them)"
        absent = [rank for rank in missing if rank in self.absent]
        if absent:
            return f"rank {absent[0]} of {self.world_size} has not come, and an earlier test has waited for it"
        if missing and self.is_overdue(now):
            return f"rank {missing[0]} of {self.world_size} did not start {next(iter(names.values()))} in time"
        return ""

    def is_overdue(self, now: float) -> bool:
        """Whether the time of the ranks to begin is over."""
        return self.meeting_ends is not None and now >= self.meeting_ends

    def short_accounts(self) -> tuple[RankAccount | None, ...]:
        """Return the accounts of all ranks without tracebacks and collectives, which only the verdict needs."""
        accounts = (self.accounts.get(rank) for rank in range(self.world_size))
        return tuple(account and replace(account, traceback="", collectives=b"") for account in accounts)

    def report(self, rank: int, now: float, stacks: Mapping[int, RankStacks]) -> RankReport:
        """The report of a rank at the end of the round. `stacks`: of ranks that still run."""
        assert self.began is not None
        if (account := self.accounts.get(rank)) is not None:
            seconds = max(0.0, account.ended - self.began)
            return report_of(rank, account, seconds)
        if rank in self.left:
            at = self.left[rank]
            return RankReport(rank, RankEnding.LOST, max(0.0, at - self.began), at, lost=HAS_LEFT)
        text = stacks[rank].text if rank in stacks else ""
        return RankReport(rank, RankEnding.STOPPED, now - self.began, now, stacks=hang.without_harness(text))


# --------------------------------------------------------------------------------------------------------------------
# The coordinator of ranks that a launcher has started: a thread of rank 0 that waits for all ranks and judges each
# round.
#
# The ranks meet there by a Unix socket, or by TCP if they are on several machines. Then, rank 0 leaves the address of
# the coordinator in the launcher's store, with a token: the coordinator hears only connections that begin with it.

# Rank 0 may import more than the others before its first test.
CONNECT_TIMEOUT = peers.LONGEST_WAIT_FOR_IMPORTS
_IN_STORE = "coordinator"
_STEP = 0.05
# A rank that waits for rank 0 longer than that says so.
_LONGEST_SILENT_WAIT = 10.0
_STACKS_TIMEOUT = 0.5


class WrongRound(RuntimeError):
    """The ranks cannot run this test together; the message says why."""


@dataclass(frozen=True)
class CoordinatorAddress:
    """The coordinator's address. `host`: by which ranks reach the machine of rank 0; `port`: 0 for a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""


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
        self._own_socket = own
        self._own = self._admit(own)
        self._is_closed = False

    def close(self) -> None:
        """End the thread, its connections and its store: otherwise they live as long as the process."""
        self._is_closed = True
        # The thread waits for events: this is one.
        with suppress(OSError):
            self._own_socket.shutdown(socket.SHUT_RDWR)
        self.join()
        self.forget()
        self._store = None

    def forget(self) -> None:
        """In a forked child: leave the connections to the process that has the coordinator."""
        self._listener.close()
        for channel in (*self._ranks.values(), self._own):
            channel.close()

    def run(self) -> None:
        try:
            self._loop.listen(self._listener, lambda: self._admit(self._listener.accept()[0]))
            while not self._is_closed:
                self._loop.step(self._proceed())
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

    def _proceed(self) -> float | None:
        """Do all that is to be done now. Returns the moment at which to ask again if nothing happens until then."""
        while True:
            if self._round.watch is None:
                meeting = self._round.meeting(now())
                if meeting is Meeting.INCOMPLETE:
                    return self._round.meeting_ends
                if meeting is Meeting.COMPLETE:
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
        if self._round.is_overdue(now()):
            self._absent.update(set(range(self._world_size)) - self._ranks.keys())
        if self._absent:
            why = f"{why}. {peers.how_to_unset()}"
        self._next_round()
        self._tell(begun, RoundRefused(why))

    def _next_round(self) -> None:
        self._lease.close()
        number = self._round.number + 1
        self._round = RoundState(number, self._world_size, self._round.left, self._last_reports, self._absent)

    def _start(self) -> None:
        self._round.start(now())
        # Of an earlier round: late answers have come before the rank's next message.
        self._stacks.clear()
        first = self._round.begun[0]
        port = self._lease.enter_context(machine_resources.leased_port())
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


# -- the meeting


def listen(launched: Launched) -> tuple[socket.socket, CoordinatorAddress, Any]:
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
        address = CoordinatorAddress()
    else:
        store = _connect_to_store(launched, now() + CONNECT_TIMEOUT)
        listener = socket.create_server(("", 0))
        address = CoordinatorAddress(_own_host(launched), listener.getsockname()[1], os.urandom(16).hex())
        store.set(_IN_STORE, messages.to_json(address))
    listener.listen(launched.world_size)
    return listener, address, store


def connect(launched: Launched) -> tuple[socket.socket, CoordinatorAddress]:
    """In any other rank: connect with the coordinator. Raises WrongRound."""
    until = now() + CONNECT_TIMEOUT
    if launched.is_one_machine:
        return _connect_until(launched, until, CoordinatorAddress)
    explaining = threading.Timer(_LONGEST_SILENT_WAIT, launched.say, [peers.explain_wait(launched, "rank 0")])
    explaining.daemon = True
    explaining.start()
    try:
        store = _connect_to_store(launched, until)
        return _connect_until(launched, until, lambda: _published(store))
    finally:
        explaining.cancel()


def _connect_until(
    launched: Launched, until: float, address_of_coordinator: Callable[[], CoordinatorAddress]
) -> tuple[socket.socket, CoordinatorAddress]:
    while True:
        # Again each time: it may be that of an earlier program in the same ranks.
        address = address_of_coordinator()
        try:
            return _connect_once(launched, address), address
        except OSError as error:
            if now() > until:
                raise _not_found(str(error)) from None
        time.sleep(_STEP)


def _connect_once(launched: Launched, address: CoordinatorAddress) -> socket.socket:
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


def _published(store: Any) -> CoordinatorAddress:
    try:
        address: CoordinatorAddress = messages.from_json(store.get(_IN_STORE), messages.by_name(CoordinatorAddress))
        return address
    except RuntimeError as error:
        # For one, torch's DistStoreError.
        raise _not_found(str(error)) from None


def _not_found(why: str) -> WrongRound:
    return WrongRound(
        f"rank 0 of this launch was not found within {CONNECT_TIMEOUT:.0f} s ({why}). {peers.how_to_unset()}"
    )


def _connect_to_store(launched: Launched, until: float) -> Any:
    """The store in which ranks on several machines find the coordinator. Raises WrongRound.

    In a thread, since torch's store waits without a limit for one who has accepted its connection and says nothing.
    """
    if not launched.store_host or not launched.store_port.isdecimal():
        raise WrongRound(
            "this launch has several machines, whose ranks meet at MASTER_ADDR and MASTER_PORT: torchrun sets "
            "these; with srun or mpirun, set them to the machine of rank 0 and a port that is free there"
        )
    makes_it = launched.rank == 0 and not launched.has_store
    address = f"{launched.store_host}:{launched.store_port}"
    if not makes_it:
        _wait_for_listener(launched, until)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        from torch_testing_ext._torch.groups import process_groups

        host, port = launched.store_host, int(launched.store_port)
        try:
            answers.put(process_groups.launcher_store(host, port, makes_it, max(1.0, until - now())))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=connect, name="torch_testing_ext store", daemon=True).start()
    try:
        answer = answers.get(timeout=max(0.0, until - now()))
    except queue.Empty:
        raise _not_found(f"what listens at {address} is no store of torch") from None
    if isinstance(answer, Exception):
        first = str(answer).partition("\n")[0] or type(answer).__name__
        raise _not_found(f"{address}: {first}") from None
    return answer


def _wait_for_listener(launched: Launched, until: float) -> None:
    """Wait until somebody listens at the address of the store: torch's own store prints long warnings until then."""
    address = launched.store_host, int(launched.store_port)
    while True:
        try:
            socket.create_connection(address, max(_STEP, until - now())).close()
            return
        except OSError as error:
            if now() > until:
                raise _not_found(f"{address[0]}:{address[1]}: {error.strerror or error}") from None
        time.sleep(_STEP)


def _own_host(launched: Launched) -> str:
    """The address of rank 0's machine, which need not be that of the store."""
    address = launched.store_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # It sends nothing.
        probe.connect((address, int(launched.store_port)))
        own = str(probe.getsockname()[0])
    if own.startswith("127."):
        # The address is a name of this machine, which others know by a real address.
        return address
    return own


# --------------------------------------------------------------------------------------------------------------------
# Tests in processes that a launcher has started, such as torchrun, mpirun or srun: they are the ranks, in place.
#
# The ranks are members of a coordinator, a thread of rank 0, each by a connection of its own. For each test, a rank
# begins a round, runs the test, and ends the round with its account. The coordinator waits for all, judges, and tells
# every rank the same verdict. It sees at once when a process ends, by its connection. A rank that does not come to the
# end of a round, since it waits for another, is ended with its process: nothing else ends a collective.

# For a test to return, once the verdict is known.
_GRACE_AFTER_VERDICT = 0.5
# For the report files of a session, if a test does not return.
_LONGEST_REPORT = 20.0
# At the end, for a rank that has had no test with the others.
_LONGEST_JOIN = 15.0


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
        """Has the launcher asked this process to end?"""
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
        # Without rank 0.
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
            time.sleep(_STEP)
        self._in_test = False
        if not isinstance(answer, RoundJudged):
            verdict = Verdict(Outcome.CRASHED, self._rank_0_was_lost(), 0)
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
            time.sleep(_STEP)
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
            time.sleep(_STEP)
        return self._coordinator.take_over()

    def _send(self, message: FromRank) -> None:
        with suppress(OSError), self._sending:
            self._channel.send(message)

    def _next(self) -> FromCoordinator | None:
        """The coordinator's next answer; None if it is gone."""
        return None if self.is_alone else self._inbox.get()

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
                self._leave_unless_the_test_returns(Verdict(Outcome.CRASHED, why, 0), f"rank {self.rank}: {why}")

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
    return "\n\n".join(thread for thread in threads if __file__ not in thread and __file__ not in thread)


def _collectives() -> bytes:
    # In the middle of a test: better without than no stacks.
    with suppress(Exception):
        return rank_collectives.collectives_of_test()
    return b""
