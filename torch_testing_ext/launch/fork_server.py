"""The fork server: the process that starts ranks and waits for them.

One thread, one loop. It is the parent of all ranks and adopts the processes that they leave behind, so that
it can end them all, and it does so when its client is gone. If no process is safe to fork, the fork server is a plain
interpreter that starts each rank as another interpreter.
"""

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
from typing import Any, NoReturn

from torch_testing_ext._process import child, grace, reaping, system
from torch_testing_ext._process.channel import Channel
from torch_testing_ext._process.loop import ParentLoop
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.signals import signal_group

from . import fork_server_messages as wire, rank as rank_process, recording
from .account_writer import summarize
from .accounts import AccountFile
from .job import Job, UnknownName
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

    def __init__(self, client: Channel[wire.ToServer], about: wire.Serve, inherited: Any = None):
        """`inherited` is for the contexts of ranks."""
        self._inherited = inherited
        self._client = client
        self._about = about
        self._loop = ParentLoop(self._reap_children)
        # By pid, until reaped.
        self._ranks: dict[int, _Rank] = {}
        # While ranks are being started.
        self._accounts: list[AccountFile] = []
        self._launches = 0
        self._is_collapsed = False
        # The reason why this process must not fork more ranks.
        self._unsafe: str | None = None
        # None: the client has not said that it goes, and its connection is there.
        self._client_is_gone: bool | None = None

    def serve(self) -> NoReturn:
        """Serve until Quit arrives or the client is gone."""
        try:
            self._loop.serve(self._client, self._on_message, self._lose_client)
            self._loop.run()
        except BaseException:
            traceback.print_exc()
        finally:
            # Ranks, and processes outside their groups: these are adopted only when their rank is dead.
            reaping.end_children()
            if self._client_is_gone is None:
                # SIGTERM, which comes as soon as its main thread has ended.
                reaping.wait_until_gone([self._about.parent], 0.5)
            if self._client_is_gone or os.getppid() != self._about.parent:
                shutil.rmtree(self._about.directory, ignore_errors=True)
            os._exit(0)

    def _lose_client(self) -> None:
        # A client that ends properly sends Quit.
        self._client_is_gone = True
        self._loop.stop()

    def _on_message(self, message: wire.ToServer) -> None:
        match message:
            case wire.Launch():
                self._launch(message.run, pickle.loads(message.job))
            case wire.Signal(run, number, rank):
                send = signal_group if rank is None else os.kill
                for process in self._ranks_of(run, None if rank is None else [rank]):
                    send(process.pid, number)
            case wire.Dump():
                self._dump(message)
            case wire.Probe(run, ranks):
                for process in self._ranks_of(run, ranks):
                    # It may have ended, or not have answered many requests.
                    with suppress(OSError):
                        process.link.send(rank_process.ASK_COLLECTIVES)
            case wire.Preload(modules, at_once):
                self._preload_all(modules, at_once)
            case wire.Quit():
                self._client_is_gone = False
                self._loop.stop()
            case wire.Serve():
                raise AssertionError("a second Serve")
            case _:
                unexpected(message)

    def _ranks_of(self, run: int, ranks: Iterable[int] | None = None) -> list[_Rank]:
        """The processes of a run, or of these ranks of it, in order."""
        of_run = [process for process in self._ranks.values() if process.run == run]
        chosen = of_run if ranks is None else [process for process in of_run if process.rank in ranks]
        return sorted(chosen, key=lambda process: process.rank)

    # -- starting ranks

    def _launch(self, run: int, job: Job) -> None:
        try:
            self._prepare_for(job)
            self._start_all(run, job)
        except UnknownName as why:
            self._client.send(wire.StartFailed(run, str(why), needs_new_server=True))
        except OSError as error:
            for process in self._ranks_of(run):
                signal_group(process.pid, signal.SIGKILL)
            self._client.send(wire.StartFailed(run, f"{type(error).__name__}: {error}", needs_new_server=False))

    def _prepare_for(self, job: Job) -> None:
        """Do once what each rank inherits. Raises UnknownName if the client has to make another server."""
        if self._unsafe:
            raise UnknownName(self._unsafe)
        self._launches += 1
        if self._about.method is not wire.StartMethod.SPAWN:
            self._collapse(at_once=job.world_size >= MANY_RANKS)
            job.context.apply()
            recording.prepare_to_sanitize(bool(job.sanitize))
        for thing in job.names:
            if self._about.method is wire.StartMethod.FORK:
                thing.inherited()
            elif self._about.method is wire.StartMethod.FORK_FRESH:
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
        self._client.send(wire.Started(run, tuple(process.pid for process in self._ranks_of(run))))

    def _start(self, run: int, job: Job, rank: int, account: AccountFile) -> None:
        """Start a rank, which begins to run."""
        # What the rank or the server alone needs, the other closes.
        with ExitStack() as of_rank, ExitStack() as of_server:
            ours, theirs = socket.socketpair()
            of_rank.enter_context(theirs)
            of_server.enter_context(ours)
            ours.setblocking(False)
            stream, output = open_streams(job, rank, of_rank, of_server)
            if self._about.method is wire.StartMethod.SPAWN:
                pid = spawn(job, rank, account, theirs, stream)
            else:

                def run_rank() -> NoReturn:
                    of_server.close()
                    self._close_inherited(account)
                    rank_process.run_and_exit(job, rank, account, theirs, stream, self._inherited)

                pid = child.fork_child(run_rank)
            of_server.pop_all()
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

    def _dump(self, message: wire.Dump) -> None:
        """Waits until the deadline at most: a rank that holds the GIL in C never sends its flight recorder."""
        deadline = now() + message.timeout
        chosen = self._ranks_of(message.run, message.ranks)
        for process in chosen:
            # A stopped process does not answer.
            signal_group(process.pid, signal.SIGCONT)

        def ask_for_stacks(process: _Rank) -> None:
            process.link.send(rank_process.ASK_STACKS)

        def signal_for_stacks(process: _Rank) -> None:
            os.kill(process.pid, system.DUMP_STACKS_NOW)

        def ask_for_recorder(process: _Rank) -> None:
            process.link.send(rank_process.ASK_RECORDER)

        soon = now() + 0.3 * message.timeout
        silent = self._ask(chosen, ask_for_stacks, rank_process.STACKS_DONE, soon)
        self._ask(silent, signal_for_stacks, rank_process.STACKS_DONE, deadline)
        self._ask(chosen, ask_for_recorder, rank_process.RECORDER_DONE, deadline)
        self._client.send(wire.Dumped(message.run))

    def _ask(self, ranks: list[_Rank], ask: Callable[[_Rank], object], answer: bytes, deadline: float) -> list[_Rank]:
        """Ask these ranks, and wait for their answers. Returns those that have given none."""
        from multiprocessing.connection import wait  # only where a rank is asked

        waiting = []
        for process in ranks:
            with suppress(OSError):
                ask(process)
                waiting.append(process)
        while waiting:
            links = [process.link for process in waiting]
            ready = wait(links, max(0.0, deadline - now()))
            if not ready:
                break
            done = [link for link in links if link in ready and _has_answered(link, answer)]
            waiting = [process for process in waiting if process.link not in done]
        return waiting

    # -- ends of ranks

    def _reap_children(self) -> None:
        for pid, status in reaping.reap():
            at = now()
            process = self._ranks.pop(pid, None)
            if process is not None:
                self._report_exit(process, status, at)

    def _report_exit(self, process: _Rank, status: int, at: float) -> None:
        leftovers = self._end_leftovers(process, in_order=os.WIFEXITED(status))
        if process.output is not None:
            self._loop.forget(process.output.pipe)
            process.output.finish()
        process.link.close()
        self._client.send(wire.Exited(process.run, process.rank, Exit(status, at, leftovers)))

    def _end_leftovers(self, process: _Rank, in_order: bool) -> tuple[str, ...]:
        """End the processes that a rank left running: its group, and processes outside it that this server adopted."""
        leftovers = self._leftovers(process)
        if leftovers and in_order:
            reaping.wait_until_gone(leftovers, grace.FOR_HELPERS)
            leftovers = self._leftovers(process)
        descriptions = tuple(system.describe(pid) for pid in leftovers if not system.is_ending(pid))
        for pid in leftovers:
            signal_group(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        reaping.wait_until_gone(leftovers)
        return descriptions

    def _leftovers(self, process: _Rank) -> list[int]:
        leftovers = []
        with suppress(ProcessLookupError, PermissionError):
            # It raises if the group is empty: then there is nothing to search.
            os.killpg(process.pid, 0)
            leftovers = system.group_members(process.pid)
        # While ranks run, an adopted process may still serve one of them.
        if not self._ranks_of(process.run):
            adopted = (pid for pid in system.children(os.getpid()) if pid not in self._ranks)
            leftovers += [pid for pid in adopted if pid not in leftovers]
        return leftovers

    # -- work while there is nothing else to do

    def _preload_all(self, modules: Iterable[str], at_once: bool) -> None:
        for name in modules:
            if name in sys.modules:
                continue
            if at_once:
                self._preload(name)
            else:
                self._loop.when_idle(partial(self._preload, name))

    def _preload(self, name: str) -> None:
        """Import a module. If that leaves threads behind, this process forks no more ranks."""
        from torch_testing_ext._machine import accelerators

        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"torch_testing_ext: importing {name} failed: {summarize(error)}", file=sys.stderr, flush=True)
        why = accelerators.check_to_fork()
        if why:
            self._loop.drop_idle()
            self._unsafe = f"importing {name} left the process unsafe to fork: {why}"


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
    client: Channel[wire.ToServer] = Channel.on(int(sys.argv[1]), wire.ToServer)
    messages: list[wire.ToServer] = []
    # The first may arrive in pieces.
    while not messages:
        messages = client.receive()
    (first,) = messages
    assert isinstance(first, wire.Serve)
    sys.argv[:] = first.argv
    child.start_session(first.parent, signal.SIGTERM)
    begin(client, first)


def begin(client: Channel[wire.ToServer], about: wire.Serve, inherited: Any = None) -> NoReturn:
    """Serve, in this process's own session. The first message is Hello: whether this process is safe to fork."""
    try:
        system.adopt_orphans()
        unsafe: str | None = None
        in_use = False
        if about.method is not wire.StartMethod.SPAWN:
            unsafe, in_use = _become_fork_server(about)
        client.send(wire.Hello(unsafe, in_use))
        ForkServer(client, about, inherited).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_fork_server(about: wire.Serve) -> tuple[str | None, bool]:
    """Prepare to be forked. Returns the reason if this process is not safe to fork, and whether it is an accelerator.

    After a fork of the client, it is the client that looks at the threads which this process lacks.
    """
    from torch_testing_ext import _torch
    from torch_testing_ext._machine import accelerators, seeds

    is_fresh = about.method is wire.StartMethod.FORK_FRESH
    if is_fresh:
        about.subject.resolve()
    seeds.prepare_to_seed()
    _torch.flight_recorder.forget_groups()
    _torch.process_state.exempt_imported(garbage=None)
    why_in_use = accelerators.unsafe_to_fork()
    unsafe = why_in_use
    if not unsafe and is_fresh:
        unsafe = accelerators.check_to_fork()
    return unsafe, why_in_use is not None
