"""Tests in processes that a launcher has started, such as torchrun, mpirun or srun: they are the ranks, in place.

The ranks are members of a hub, a thread of rank 0, each by a connection of its own. For each test, a rank begins a
round, runs the test, and ends the round with its account. The hub waits for all, judges, and tells every rank the same
verdict. It sees at once when a process ends, by its connection. A rank that does not come to the end of a round, since
it waits for another, is ended with its process: nothing else ends a collective.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import queue
import signal
import socket
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch_testing_ext._collectives.raw import agree, unpack
from torch_testing_ext._machine import ports
from torch_testing_ext._process.loop import EventLoop

from . import hang, recording
from .accounts import RankAccount, RankEnding
from .causes import Cause
from .job import Sanitize
from .launchers import Launched
from .report import RankReport, now
from .sanitizer_logs import Logs
from .verdict import Case, Expected, Outcome, Verdict, failed_by_itself, judge
from .watch import GRACE_AFTER_DEATH

_PATIENCE_TO_CONNECT = 120.0  # rank 0 may import more than the others before its first test
# After a rank has ended, the others may need a while: whoever does not return loses its process, and the session.
_GRACE = 5.0
_PATIENCE_TO_LEAVE = 0.5  # for a test to return, once the verdict is known
_PATIENCE_FOR_STACKS = 0.5
_LEFT = "its process has ended: it was killed, crashed or exited"


class WrongRound(RuntimeError):
    """The ranks cannot run this test together; the message says why."""


# Read once: tests may change these variables.
launched = Launched.read(os.environ)
# pytest captures what is written to the descriptor 2 later.
_terminal = os.dup(2) if launched is not None else 2
_member: Member | None = None


def member() -> Member:
    """This process as a rank of its launch. Raises WrongRound."""
    global _member
    assert launched is not None
    if not launched.is_one_machine:
        raise WrongRound("tests in the ranks of a launcher run on one machine; this launch has several")
    if _member is None:
        _member = Member(launched)
    return _member


def is_ending() -> bool:
    """Has the launcher asked this process to end?"""
    return _member is not None and _member.is_ending


@dataclass(frozen=True)
class Round:
    """One test that all ranks run. `directory` and `port` are for them all."""

    number: int
    directory: str
    port: int
    sanitize: Sanitize


def log_of(directory: str, rank: int) -> Path:
    """The log of a rank in a round, if it is sanitized."""
    return Path(directory, f"rank{rank}.sanitizer")


class _Lines:
    """Messages in both directions, a line of JSON each."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._unread = b""
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, **message: Any) -> None:
        with suppress(OSError), self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Wait for messages. Raises EOFError at the end."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Member:
    """This process as one of the ranks: begins and ends rounds in the main thread, and hears the hub in another."""

    def __init__(self, where: Launched):
        self.rank, self.world_size = where.rank, where.world_size
        address = f"\0torch_testing_ext-{where.key}"
        self._pid = os.getpid()
        if self.rank == 0:
            ours, theirs = socket.socketpair()
            hub = _Hub(address, self.world_size, _Lines(theirs))
            os.register_at_fork(after_in_child=hub.forget)
            hub.start()
        else:
            ours = _connect(address)
        self._lines = _Lines(ours)
        os.register_at_fork(after_in_child=self._lines.close)  # the end of this process must close the connection
        self._lines.send(kind="hello", rank=self.rank)
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._in_test = False
        self.is_ending = False  # the launcher has asked this process to end
        self.is_alone = False  # without rank 0
        self.deciding: dict[int, tuple[str, ...]] = {}  # the ranks that failed by themselves, with their notes
        signal.signal(signal.SIGTERM, self._on_sigterm)
        threading.Thread(target=self._listen, name="torch_testing_ext rank", daemon=True).start()

    def _on_sigterm(self, number: int, frame: Any) -> None:
        """A launcher ends all ranks when one has died: only after the verdict on their test."""
        if self._in_test and not self.is_ending:
            self.is_ending = True
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def begin(self, case: Case, directory: str, timeout: float | None, may_differ: bool, sanitize: Sanitize) -> Round:
        """Wait until every rank begins this test. Raises WrongRound if one begins another test or has left."""
        self._in_test = True
        self._lines.send(
            kind="begin",
            case=vars(case),
            directory=directory,
            timeout=timeout,
            may_differ=may_differ,
            sanitize=sanitize.encode(),
        )
        answer = self._next()
        if answer["kind"] == "go":
            recording.begin()
            recording.begin_first_task()
            return Round(answer["number"], answer["directory"], answer["port"], Sanitize.decode(answer["sanitize"]))
        self._in_test = False
        raise WrongRound(answer["message"])

    def end(self, of: Round, account: RankAccount) -> Verdict:
        """Tell how the test ended here, and wait for the verdict on all ranks."""
        if os.getpid() != self._pid:
            os._exit(1)  # a child that the test has forked does not speak for the rank
        fields = {**vars(account), "ending": account.ending.value, "cause": account.cause.value}
        fields["collectives"] = _as_text(account.collectives)
        self._lines.send(kind="end", number=of.number, account=fields)
        answer = self._next()
        self._in_test = False
        if answer["kind"] != "verdict":
            return Verdict(Outcome.CRASHED, answer["message"], 0)
        self.deciding = {int(rank): tuple(notes) for rank, notes in answer["deciding"].items()}
        return Verdict(Outcome(answer["outcome"]), answer["message"], answer["culprit"], answer["code"])

    def _next(self) -> dict[str, Any]:
        if self.is_alone:
            return self._lost_message()
        return self._inbox.get()

    def _lost_message(self) -> dict[str, Any]:
        return {"kind": "lost", "message": f"rank 0 of {self.world_size} was lost: {_LEFT}", "stuck": True}

    def _listen(self) -> None:
        """In a thread: pass on what the hub says. Ends this process if its test does not return."""
        while True:
            try:
                messages = self._lines.receive()
            except EOFError:
                self.is_alone = True
                messages = [self._lost_message()]
            for message in messages:
                if message["kind"] == "stacks":
                    self._lines.send(kind="stacks", text=_stacks(), collectives=_as_text(_told_now()))
                    continue
                self._inbox.put(message)
                if message.get("stuck"):
                    self._leave_unless_the_test_returns(message)
            if self.is_alone:
                return

    def _leave_unless_the_test_returns(self, message: dict[str, Any]) -> None:
        until = now() + _PATIENCE_TO_LEAVE
        while self._in_test and now() < until:
            time.sleep(0.01)
        if self._in_test:
            if message["kind"] == "lost":
                _print(f"rank {self.rank}: {message['message']}")
            os._exit(1)


def _connect(address: str) -> socket.socket:
    until = now() + _PATIENCE_TO_CONNECT
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            if now() > until:
                raise WrongRound(
                    f"rank 0 of this launch was not found within {_PATIENCE_TO_CONNECT:.0f} s ({error}). The variables "
                    f"RANK and WORLD_SIZE say that a launcher has started this process; unset them if none has"
                ) from None
        time.sleep(0.05)


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().split("\n\n")
    return "\n\n".join(thread for thread in threads if __file__ not in thread)


def _told_now() -> bytes:
    with suppress(Exception):  # in the middle of a test: better without than no stacks
        return recording.collectives()
    return b""


def _as_text(collectives: bytes) -> str:
    return base64.b64encode(collectives).decode()


def _print(text: str) -> None:
    with suppress(OSError):
        os.write(_terminal, f"\n{text}\n".encode(errors="replace"))


class _Hub(threading.Thread):
    """Waits for all ranks, judges each round, and tells the verdict. Runs in rank 0."""

    def __init__(self, address: str, world_size: int, own: _Lines):
        super().__init__(name="torch_testing_ext hub", daemon=True)
        self._world_size = world_size
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(address)
        except OSError as error:
            raise WrongRound(f"another process is rank 0 of this launch: {error}") from None
        self._listener.listen(world_size)
        self._loop = EventLoop()
        self._ranks: dict[int, _Lines] = {}
        self._left: dict[int, float] = {}  # the ranks whose connections have closed, and when
        self._stacks: dict[int, str] = {}
        self._told: dict[int, bytes] = {}  # with the stacks: the collectives until then
        self._number = 0
        self._reset()
        self._own = own
        self._admit(own)

    def forget(self) -> None:
        """In a forked child: leave the connections to the process that has the hub."""
        self._listener.close()
        for lines in (*self._ranks.values(), self._own):
            lines.close()

    def _reset(self) -> None:
        self._number += 1
        self._begun: dict[int, dict[str, Any]] = {}
        self._accounts: dict[int, RankAccount] = {}
        self._runs = False  # all have begun
        self._began = 0.0
        self._until: float | None = None
        self._grace: float | None = None
        self._lease: Any = None
        self._named = False

    def run(self) -> None:
        try:
            self._loop.listen(self._listener, lambda: self._admit(_Lines(self._listener.accept()[0])))
            while True:
                ends = [end for end in (self._until, self._grace) if end is not None]
                self._loop.step(min(ends, default=None))
                self._proceed()
        except BaseException as error:  # without a hub no test can pass
            _print(f"the verdict on all ranks cannot be made: {error!r}")
            os._exit(1)

    def _admit(self, lines: _Lines) -> None:
        rank = -1

        def receive() -> None:
            nonlocal rank
            try:
                for message in lines.receive():
                    if message["kind"] == "hello":
                        if message["rank"] in self._ranks:  # a process that a test has started with our variables
                            raise EOFError
                        rank = message["rank"]
                        self._ranks[rank] = lines
                    else:
                        self._on_message(rank, message)
            except EOFError:
                self._loop.forget(lines)
                lines.close()
                if rank >= 0:
                    self._left.setdefault(rank, now())

        self._loop.listen(lines, receive)

    def _on_message(self, rank: int, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "begin":
                self._begun[rank] = message
                if self._until is None and message["timeout"] is not None:
                    self._until = now() + message["timeout"]
            case "end" if message["number"] == self._number:  # not late, when the verdict is known
                fields = {**message["account"], "ending": RankEnding(message["account"]["ending"])}
                fields["cause"] = Cause(fields["cause"])
                for name in ("imported", "notes"):
                    fields[name] = tuple(fields[name])
                fields["collectives"] = base64.b64decode(fields["collectives"])
                self._accounts[rank] = RankAccount(**fields)
            case "stacks":
                self._stacks[rank] = message["text"]
                self._told[rank] = base64.b64decode(message["collectives"])

    # -- a round

    def _proceed(self) -> None:
        if self._begun and not self._runs:
            self._try_to_begin()
        if self._runs:
            self._try_to_end()

    def _try_to_begin(self) -> None:
        names = {rank: str(message["case"]["name"]) for rank, message in self._begun.items()}
        missing = [rank for rank in range(self._world_size) if rank not in self._begun]
        why = ""
        if len(set(names.values())) > 1:
            why = "; ".join(f"rank {rank} runs {name}" for rank, name in sorted(names.items()))
            why = f"the ranks of the launcher run different tests: {why}"
        elif gone := [rank for rank in missing if rank in self._left]:
            why = f"rank {gone[0]} of {self._world_size} is missing: {_LEFT}"
        elif missing and self._until is not None and now() >= self._until:
            why = f"rank {missing[0]} of {self._world_size} has not begun {next(iter(names.values()))} in time"
        if why:
            self._tell(list(self._begun), kind="no", message=why)
            self._reset()
        elif not missing:
            self._runs, self._began = True, now()
            first = self._begun[0]
            self._until = None if first["timeout"] is None else self._began + first["timeout"]
            self._lease = ports.leased_port()
            port = self._lease.__enter__()
            self._tell(
                list(self._begun),
                kind="go",
                number=self._number,
                directory=first["directory"],
                port=port,
                sanitize=first["sanitize"],
            )

    def _tell(self, ranks: list[int], **message: Any) -> None:
        for rank in ranks:
            self._ranks[rank].send(**message)

    def _running(self) -> list[int]:
        return [rank for rank in self._begun if rank not in self._accounts and rank not in self._left]

    def _try_to_end(self) -> None:
        grace = self._earliest_grace()
        if grace is not None:
            self._grace = grace
        timed_out = self._until is not None and now() >= self._until
        if self._running() and not timed_out:
            if self._grace is None or now() < self._grace:
                return
            if not self._named and any(rank not in self._accounts for rank in self._left):
                self._name_who_left()
                return
        running = self._running()
        if running:
            self._take_stacks(running)
            running = self._running()  # one may have ended meanwhile, because it was asked
        reports = self._with_collectives([self._report(rank, timed_out) for rank in range(self._world_size)])
        first = self._begun[0]
        case = replace(Case(**first["case"]), note=Sanitize.decode(first["sanitize"]).note)
        verdict = judge(reports, timed_out, case, Expected(may_differ=first["may_differ"]))
        stuck = bool(running)
        if stuck:
            # Said at once and once, before any process ends: the launcher ends all of them when it sees the first.
            _print(
                f"{verdict.message}\n\nThe ranks that still run cannot go on: their processes are ended, with rank 0's."
            )
        self._lease.__exit__(None, None, None)
        told = [rank for rank in self._begun if rank not in self._left]
        self._reset()
        # Rank 0 last: its process has the hub.
        self._tell(
            sorted(told, reverse=True),
            kind="verdict",
            outcome=verdict.outcome.value,
            message=verdict.message,
            culprit=verdict.culprit,
            code=verdict.code,
            deciding={report.rank: report.notes for report in reports if failed_by_itself(report)},
            stuck=stuck,
        )

    def _earliest_grace(self) -> float | None:
        """When the ranks that still run have had the time to see what another rank did."""
        left = [at for rank, at in self._left.items() if rank not in self._accounts]
        if left and not self._named:
            return min(left) + GRACE_AFTER_DEATH
        ends = [account.ended for account in self._accounts.values() if account.ending is not RankEnding.PASSED]
        return min((at + _GRACE for at in (*left, *ends)), default=None)

    def _name_who_left(self) -> None:
        """Say it at once: the launcher is about to end the other ranks."""
        self._named = True
        left = [rank for rank in sorted(self._left) if rank not in self._accounts]
        name = self._begun[0]["case"]["name"] if 0 in self._begun else "a test"
        for rank in left:
            _print(f"rank {rank} of {self._world_size} has left in {name}: {_LEFT}")

    def _take_stacks(self, ranks: list[int]) -> None:
        self._stacks.clear()
        self._told.clear()
        self._tell(ranks, kind="stacks")
        until = now() + _PATIENCE_FOR_STACKS
        while any(rank not in self._stacks for rank in ranks) and self._loop.step(until):
            pass

    def _with_collectives(self, reports: list[RankReport]) -> list[RankReport]:
        """Add what the ranks have issued, unless all passed and issued the same."""
        accounts = [self._accounts.get(report.rank) for report in reports]
        left = [
            unpack(account.collectives if account is not None else self._told.get(rank, b""))
            for rank, account in enumerate(accounts)
        ]
        have_passed = all(report.ending is RankEnding.PASSED for report in reports)
        first = self._begun[0]
        paths = [log_of(first["directory"], rank) for rank in range(self._world_size)]
        if logs := Logs(paths, Sanitize.decode(first["sanitize"])):
            reports = logs.complete(reports, have_passed)
            logs.remove()
        if have_passed and agree(left):
            return reports
        return [
            replace(report, recorder=raw.text() if raw is not None else "")
            for report, raw in zip(reports, left, strict=True)
        ]

    def _report(self, rank: int, timed_out: bool) -> RankReport:
        account = self._accounts.get(rank)
        if account is not None:
            return RankReport(
                rank,
                account.ending,
                max(0.0, account.ended - self._began),
                account.ended,
                account.code,
                account.summary,
                account.traceback,
                notes=account.notes,
                cause=account.cause,
            )
        if rank in self._left:
            at = self._left[rank]
            return RankReport(rank, RankEnding.LOST, max(0.0, at - self._began), at, summary=_LEFT)
        stacks = hang.tidy(self._stacks.get(rank, ""))
        return RankReport(rank, RankEnding.STOPPED, now() - self._began, now(), stacks=stacks)
