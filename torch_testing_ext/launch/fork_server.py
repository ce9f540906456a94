"""The fork server: the process that starts ranks and waits for them.

One thread, one loop. It is the parent of all ranks and adopts the processes that they leave behind, so that
it can end them all, and it does so when its client is gone. If no process is safe to fork, the fork server is a plain
interpreter that starts each rank as another interpreter.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext._process import child, reaping, system
from torch_testing_ext._process.channel import Channel
from torch_testing_ext._process.loop import EventLoop, ParentLoop
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.signals import signal_group

from . import rank as rank_process, recording
from .account_writer import summarize
from .accounts import AccountFile
from .fork_server_messages import (
    Dump,
    Dumped,
    Exited,
    FromServer,
    Hello,
    Launch,
    NeedsNewServer,
    Preload,
    Probe,
    Quit,
    Serve,
    SignalGroups,
    SignalRank,
    Started,
    StartFailed,
    StartMethod,
    ToServer,
)
from .job import Job, Named, UnknownName
from .rank_report import Exit, now
from .starting import StreamedOutput, open_streams, spawn

# It pays to collapse memory into huge pages, since a fork then copies far fewer page tables: while the server is idle
# after this launch, or before one of so many ranks.
COLLAPSE_AT = 2
MANY_RANKS = 64


@dataclass
class _Rank:
    """A rank that this server has started. `link`: the socket over which the rank answers requests for stacks."""

    run: int
    rank: int
    pid: int
    link: socket.socket
    output: StreamedOutput | None = None


class ForkServer:
    """Starts ranks on request, and reports their ends."""

    def __init__(
        self, client: Channel[ToServer], directory: Path, method: StartMethod, parent: int, inherited: Any = None
    ):
        """`directory` belongs to the session of the client, whose pid is `parent`.

        The server removes it if the client ends without having removed it. `inherited` is for the contexts of ranks.
        """
        self._inherited = inherited
        self._client = client
        self._directory = directory
        self._method = method
        self._parent = parent
        self._loop = ParentLoop(self._reap_children)
        self._ranks: dict[int, _Rank] = {}  # by pid, until reaped
        self._accounts: list[AccountFile] = []  # while ranks are being started
        self._launches = 0
        self._is_collapsed = False
        self._unsafe: str | None = None  # why this process must not fork more ranks
        self._client_is_gone = False

    def serve(self) -> NoReturn:
        """Serve until Quit arrives or the client is gone."""
        try:
            self._loop.listen(self._client, self._receive)
            self._loop.run()
        except BaseException:
            traceback.print_exc()
        finally:
            # Ranks, and processes outside their groups: these are adopted only when their rank is dead.
            reaping.end_children()
            if self._client_is_gone or os.getppid() != self._parent:
                shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(0)

    def _receive(self) -> None:
        try:
            messages = self._client.receive()
        except (EOFError, OSError):
            self._client_is_gone = True  # a client that ends properly sends Quit
            self._loop.stop()
            return
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: ToServer) -> None:
        match message:
            case Launch():
                self._launch(message.run, pickle.loads(message.job))
            case SignalGroups(run, number):
                for one in self._ranks_of(run):
                    signal_group(one.pid, number)
            case SignalRank(run, rank, number):
                for one in self._ranks_of(run, [rank]):
                    os.kill(one.pid, number)
            case Dump():
                self._dump(message)
            case Probe(run, ranks):
                for one in self._ranks_of(run, ranks):
                    with suppress(OSError):  # it has ended, or has not answered many requests
                        one.link.send(rank_process.ASK_COLLECTIVES)
            case Preload(modules, at_once):
                for name in modules:
                    if name in sys.modules:
                        continue
                    if at_once:
                        self._preload(name)
                    else:
                        self._loop.when_idle(partial(self._preload, name))
            case Quit():
                self._loop.stop()
            case Serve():
                raise AssertionError("a second Serve")
            case _:
                unexpected(message)

    def _send(self, message: FromServer) -> None:
        self._client.send(message)

    def _ranks_of(self, run: int, ranks: Iterable[int] | None = None) -> list[_Rank]:
        chosen = [one for one in self._ranks.values() if one.run == run and (ranks is None or one.rank in ranks)]
        return sorted(chosen, key=lambda one: one.rank)

    # -- starting ranks

    def _launch(self, run: int, job: Job) -> None:
        try:
            self._prepare_for(job)
            self._start_all(run, job)
        except UnknownName as why:
            self._send(NeedsNewServer(run, str(why)))
        except OSError as error:
            for one in self._ranks_of(run):
                signal_group(one.pid, signal.SIGKILL)
            self._send(StartFailed(run, f"{type(error).__name__}: {error}"))

    def _prepare_for(self, job: Job) -> None:
        if self._unsafe:
            raise UnknownName(self._unsafe)  # the client makes another server
        self._launches += 1
        if self._method is not StartMethod.SPAWN:
            self._collapse(at_once=job.world_size >= MANY_RANKS)
            job.context.apply()  # once, here: each rank inherits it
            recording.prepare_to_sanitize(bool(job.sanitize))
        for thing in job.names:
            if self._method is StartMethod.FORK:
                thing.inherited()
            elif self._method is StartMethod.FORK_FRESH:
                thing.resolve()

    def _collapse(self, at_once: bool) -> None:
        if self._is_collapsed or not (at_once or self._launches >= COLLAPSE_AT):
            return
        self._is_collapsed = True
        if at_once:
            system.collapse_all()
            return
        for region in system.memory_regions():
            self._loop.when_idle(partial(system.collapse, *region))

    def _start_all(self, run: int, job: Job) -> None:
        try:
            # All files first, so that a full disk is noticed before any rank has started.
            self._accounts.extend(AccountFile.open(job.account(rank)) for rank in range(job.world_size))
            for rank, account in enumerate(self._accounts):
                self._start(run, job, rank, account)
        finally:
            for account in self._accounts:
                account.close()
            self._accounts.clear()
        self._send(Started(run, tuple(one.pid for one in self._ranks_of(run))))

    def _start(self, run: int, job: Job, rank: int, account: AccountFile) -> None:
        with ExitStack() as owner:
            ours, theirs = socket.socketpair()
            owner.enter_context(theirs)
            ours.setblocking(False)
            failed = owner.enter_context(ExitStack())  # closed only if no rank is started
            failed.callback(ours.close)
            stream, output = open_streams(job, rank, owner)
            if output is not None:
                failed.callback(output.close)
            if self._method is StartMethod.SPAWN:
                pid = spawn(job, rank, account, theirs, stream)
            else:

                def run_rank() -> NoReturn:
                    ours.close()
                    self._close_inherited(account)
                    rank_process.run_and_exit(job, rank, account, theirs, stream, self._inherited)

                pid = child.fork_child(run_rank)
            failed.pop_all()
            self._ranks[pid] = _Rank(run, rank, pid, ours, output)
            if output is not None:
                self._loop.listen(output.pipe, output.copy)

    def _close_inherited(self, own: AccountFile) -> None:
        """In a new rank: close the descriptors of the server and of other ranks."""
        self._client.close()
        self._loop.abandon()
        for account in self._accounts:
            if account is not own:
                account.close()
        for sibling in self._ranks.values():
            sibling.link.close()
            if sibling.output is not None:
                sibling.output.close()

    # -- asking ranks for their stacks and flight recorders

    def _dump(self, message: Dump) -> None:
        """Waits until the deadline at most: a rank that holds the GIL in C never sends its flight recorder."""
        deadline = now() + message.timeout
        chosen = self._ranks_of(message.run, message.ranks)
        for one in chosen:
            signal_group(one.pid, signal.SIGCONT)  # a stopped process does not answer
        self._ask(chosen, lambda one: os.kill(one.pid, system.DUMP_STACKS), rank_process.STACKS_DONE, deadline)
        self._ask(chosen, lambda one: one.link.send(rank_process.ASK_RECORDER), rank_process.RECORDER_DONE, deadline)
        self._send(Dumped(message.run))

    def _ask(self, ranks: list[_Rank], ask: Callable[[_Rank], object], answer: bytes, deadline: float) -> None:
        loop, waiting = EventLoop(), set[socket.socket]()

        def receive(link: socket.socket) -> None:
            if _has_answered(link, answer):
                waiting.remove(link)
                loop.forget(link)

        for one in ranks:
            with suppress(OSError):
                ask(one)
                waiting.add(one.link)
                loop.listen(one.link, partial(receive, one.link))
        while waiting and loop.step(deadline):
            pass
        loop.close()

    # -- ends of ranks

    def _reap_children(self) -> None:
        for pid, status in reaping.reap():
            at = now()
            one = self._ranks.pop(pid, None)
            if one is not None:
                self._report_exit(one, status, at)

    def _report_exit(self, one: _Rank, status: int, at: float) -> None:
        leftovers = self._end_leftovers(one)
        if one.output is not None:
            self._loop.forget(one.output.pipe)
            one.output.finish()
        one.link.close()
        self._send(Exited(one.run, one.rank, Exit(status, at, leftovers)))

    def _end_leftovers(self, one: _Rank) -> tuple[str, ...]:
        """End the processes that a rank left running: its group, and processes outside it that this server adopted."""
        found = []
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.pid, 0)  # raises if the group is empty: no search needed
            found = system.group_members(one.pid)
        if not self._ranks_of(one.run):  # while ranks run, an adopted process may still serve one of them
            found += [pid for pid in self._adopted() if pid not in found]
        descriptions = tuple(system.describe(pid) for pid in found)
        for pid in found:
            signal_group(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.pid, signal.SIGKILL)
        reaping.wait_until_gone(found)
        return descriptions

    def _adopted(self) -> list[int]:
        return [pid for pid in system.children(os.getpid()) if pid not in self._ranks]

    # -- work while there is nothing else to do

    def _preload(self, name: str) -> None:
        self._do_safely(partial(importlib.import_module, name), f"importing {name}")

    def _do_safely(self, work: Callable[[], object], doing: str) -> None:
        """Do work that may leave threads behind. If it does, this process forks no more ranks."""
        from torch_testing_ext._machine import accelerators

        try:
            work()
        except Exception as error:
            print(f"torch_testing_ext: {doing} failed: {summarize(error)}", file=sys.stderr, flush=True)
        if why := accelerators.check_to_fork():
            self._loop.drop_idle()
            self._unsafe = f"{doing} left the process unsafe to fork: {why}"


def _has_answered(link: socket.socket, answer: bytes) -> bool:
    """Has the rank given this answer, or closed its end? Other bytes are signals that the test has handlers for."""
    try:
        received = link.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not received or answer in received


def main() -> NoReturn:
    """Run a server that is a new interpreter: `python -c "... main()" CHANNEL`. Its client sends the first message."""
    client: Channel[ToServer] = Channel.on(int(sys.argv[1]), ToServer)
    messages: list[ToServer] = []
    while not messages:  # the first may arrive in pieces
        messages = client.receive()
    (first,) = messages
    assert isinstance(first, Serve)
    sys.argv[:] = first.argv
    child.start_session(first.parent, signal.SIGTERM)
    begin(client, first.directory, first.method, first.parent, first.subject)


def begin(
    client: Channel[ToServer],
    directory: Path,
    method: StartMethod,
    parent: int,
    subject: Named | None = None,
    inherited: Any = None,
) -> NoReturn:
    """Serve, in this process's own session. The first message is Hello: whether this process is safe to fork."""
    try:
        system.adopt_orphans()
        unsafe = None if method is StartMethod.SPAWN else _become_fork_server(method, subject)
        client.send(Hello(unsafe, in_use=unsafe is not None and unsafe == _accelerator_in_use()))
        ForkServer(client, directory, method, parent, inherited).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_fork_server(method: StartMethod, subject: Named | None) -> str | None:
    """Prepare to be forked. Returns the reason if this process is not safe to fork, or None."""
    from torch_testing_ext import _torch
    from torch_testing_ext._machine import accelerators, seeds

    if method is StartMethod.FORK_FRESH:
        assert subject is not None
        subject.resolve()
    seeds.prepare_to_seed()
    _torch.flight_recorder.forget_groups()
    _torch.process_state.exempt_imported(garbage=None)
    # After a fork of the client, it is the client that looks at the threads which this process lacks.
    return accelerators.check_to_fork() if method is StartMethod.FORK_FRESH else accelerators.unsafe_to_fork()


def _accelerator_in_use() -> str | None:
    """Why the ranks of this process could use no accelerator, or None."""
    from torch_testing_ext._machine import accelerators

    return accelerators.unsafe_to_fork()
