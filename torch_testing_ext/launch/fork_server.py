"""The fork server: the process that starts ranks and waits for them."""

import importlib
import os
import pickle
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch_testing_ext._process import ends, sessions, system
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.fork_host import Child, Exit, ForkHost
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.signals import signal_group
from torch_testing_ext._tests import system_refusals
from torch_testing_ext.launch import in_rank, rank_collectives
from torch_testing_ext.launch.account_writer import summarize
from torch_testing_ext.launch.accounts import AccountFile, now
from torch_testing_ext.launch.fork_server_messages import (
    Dump,
    Dumped,
    Exited,
    Hello,
    Launch,
    Preload,
    Probe,
    Quit,
    Serve,
    Signal,
    Start,
    Started,
    StartedRank,
    StartFailed,
    StartMethod,
    ToServer,
)
from torch_testing_ext.launch.jobs import Job
from torch_testing_ext.launch.named import UnknownName
from torch_testing_ext.launch.rank_processes import StreamedOutput, open_streams, spawn

# It pays to collapse memory into huge pages, since a fork then copies far fewer page tables: while the server is idle
# after this launch, or before one of so many ranks.
COLLAPSE_AT = 2


MANY_RANKS = 64


@dataclass(eq=False)
class _Rank(Child):
    """A rank of the run with this number. `link`: the socket over which the rank answers requests for stacks."""

    rank: int
    link: socket.socket
    output: StreamedOutput | None = None


class ForkServer(ForkHost[ToServer, _Rank]):
    """Starts ranks on request, and reports their ends."""

    def __init__(self, client: Channel[ToServer], about: Serve, inherited: Any = None):
        """`inherited` is for the contexts of ranks."""
        super().__init__(client)
        self._inherited = inherited
        self._about = about
        # The accounts of ranks that are being started.
        self._accounts: list[AccountFile] = []
        self._launches = 0
        self._is_collapsed = False
        # The reason why this process must not fork more ranks.
        self._unsafe: str | None = None
        # None: the client has not said that it goes, and its connection is there.
        self._client_is_gone: bool | None = None

    def serve(self) -> NoReturn:
        """Serve until Quit or SIGTERM arrives, or the client is gone. Then all ranks end, and this process."""
        try:
            super().serve()
        except BaseException:
            traceback.print_exc()
        finally:
            if self._client_is_gone is None:
                # SIGTERM, which comes as soon as its main thread has ended.
                ends.wait_until_gone([self._about.parent], 0.5)
            if self._client_is_gone or os.getppid() != self._about.parent:
                shutil.rmtree(self._about.directory, ignore_errors=True)
            os._exit(0)

    def on_client_lost(self) -> None:
        # A client that ends properly sends Quit.
        self._client_is_gone = True
        super().on_client_lost()

    def on_message(self, message: ToServer) -> None:
        match message:
            case Launch():
                self._launch(message.run, pickle.loads(message.job))
            case Start():
                self._start_later(message.run, message.rank, pickle.loads(message.job))
            case Signal(run, number, rank):
                if rank is None:
                    self.signal_children(run, number)
                else:
                    for process in self._ranks_of(run, [rank]):
                        os.kill(process.pid, number)
            case Dump():
                self._dump(message)
            case Probe(run, ranks):
                for process in self._ranks_of(run, ranks):
                    # It may have ended, or not have answered many requests.
                    with suppress(OSError):
                        process.link.send(in_rank.ASK_COLLECTIVES)
            case Preload(modules, at_once):
                self._preload_all(modules, at_once)
            case Quit():
                self._client_is_gone = False
                self.loop.stop()
            case Serve():
                raise AssertionError("a second Serve")
            case _:
                unexpected(message)

    def _ranks_of(self, run: int, ranks: Collection[int]) -> list[_Rank]:
        """The processes of these ranks of a run, in order."""
        return [process for process in self.children_of(run) if process.rank in ranks]

    # -- starting ranks

    def _launch(self, run: int, job: Job) -> None:
        try:
            self._prepare_for(job)
            self._start_all(run, job)
        except UnknownName as why:
            self.client.send(StartFailed(run, str(why), needs_new_server=True))
        except OSError as error:
            self.signal_children(run, signal.SIGKILL)
            why_not = f"{type(error).__name__}: {system_refusals.why_refused(error)}"
            self.client.send(StartFailed(run, why_not, needs_new_server=False))

    def _start_later(self, run: int, rank: int, job: Job) -> None:
        try:
            self._prepare_for(job)
            account = AccountFile.open(job.account(rank))
            account.clear()
            self._accounts.append(account)
            try:
                self._start(run, job, rank, account)
            finally:
                account.close()
                self._accounts.clear()
        except (UnknownName, OSError) as error:
            self.client.send(StartFailed(run, f"rank {rank}: {error}", needs_new_server=False))
            return
        (process,) = self._ranks_of(run, [rank])
        self.client.send(StartedRank(run, rank, process.pid))

    def _prepare_for(self, job: Job) -> None:
        """Do once what each rank inherits. Raises UnknownName if the client has to make another server."""
        if self._unsafe:
            raise UnknownName(self._unsafe)
        self._launches += 1
        if self._about.method is not StartMethod.SPAWN:
            self._collapse(at_once=job.world_size >= MANY_RANKS)
            job.context.apply()
            rank_collectives.prepare_to_sanitize(job.sanitize)
        for thing in job.names:
            if self._about.method is StartMethod.FORK:
                thing.inherited()
            elif self._about.method is StartMethod.FORK_FRESH:
                thing.resolve()

    def _collapse(self, at_once: bool) -> None:
        if self._is_collapsed or not (at_once or self._launches >= COLLAPSE_AT):
            return
        self._is_collapsed = True
        if at_once:
            system.collapse_all()
            return
        for region in system.memory_regions():
            self.loop.when_idle(partial(system.collapse, *region))

    def _start_all(self, run: int, job: Job) -> None:
        try:
            # All files first, so that a full disk is noticed before any rank has started.
            self._accounts.extend(AccountFile.open(job.account(rank)) for rank in range(job.first_ranks))
            for rank, account in enumerate(self._accounts):
                self._start(run, job, rank, account)
        finally:
            for account in self._accounts:
                account.close()
            self._accounts.clear()
        self.client.send(Started(run, tuple(process.pid for process in self.children_of(run))))

    def _start(self, run: int, job: Job, rank: int, account: AccountFile) -> None:
        """Start a rank, which begins to run."""
        # What the rank or the server alone needs, the other closes.
        with ExitStack() as of_rank, ExitStack() as of_server:
            ours, theirs = socket.socketpair()
            of_rank.enter_context(theirs)
            of_server.enter_context(ours)
            ours.setblocking(False)
            stream, output = open_streams(job, rank, of_rank, of_server)
            if self._about.method is StartMethod.SPAWN:
                pid = spawn(job, rank, account, theirs, stream)
            else:
                siblings = tuple(process.pid for process in self.children_of(run))

                def run_rank() -> NoReturn:
                    of_server.close()
                    self._close_accounts(account)
                    in_rank.run_and_exit(job, rank, account, theirs, stream, self._inherited, siblings)

                pid = self.fork(run_rank)
            of_server.pop_all()
            self.children[pid] = _Rank(run, pid, rank, ours, output)
            if output is not None:
                self.loop.listen(output.pipe, output.copy)

    def close_inherited(self) -> None:
        """In a new rank: close the connections of the server, and those to other ranks."""
        super().close_inherited()
        for sibling in self.children.values():
            sibling.link.close()
            if sibling.output is not None:
                sibling.output.close()

    def _close_accounts(self, own: AccountFile) -> None:
        """In a new rank: close the accounts of other ranks."""
        for account in self._accounts:
            if account is not own:
                account.close()

    # -- asking ranks for their stacks and flight recorders

    def _dump(self, message: Dump) -> None:
        """Waits until the deadline at most: a rank that holds the GIL in C never sends its flight recorder."""
        deadline = now() + message.timeout
        chosen = self._ranks_of(message.run, message.ranks)
        for process in chosen:
            # A stopped process does not answer.
            signal_group(process.pid, signal.SIGCONT)

        def ask_for_stacks(process: _Rank) -> None:
            process.link.send(in_rank.ASK_STACKS)

        def signal_for_stacks(process: _Rank) -> None:
            os.kill(process.pid, system.DUMP_STACKS_NOW)

        def ask_for_recorder(process: _Rank) -> None:
            process.link.send(in_rank.ASK_RECORDER)

        soon = now() + 0.3 * message.timeout
        silent = self._ask(chosen, ask_for_stacks, in_rank.STACKS_DONE, soon)
        self._ask(silent, signal_for_stacks, in_rank.STACKS_DONE, deadline)
        self._ask(chosen, ask_for_recorder, in_rank.RECORDER_DONE, deadline)
        self.client.send(Dumped(message.run))

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

    def on_end(self, child: _Rank, end: Exit) -> None:
        if child.output is not None:
            self.loop.forget(child.output.pipe)
            child.output.finish()
        child.link.close()
        self.client.send(Exited(child.number, child.rank, end))

    def leftovers(self, child: _Rank) -> list[int]:
        """The group of a rank, and processes outside it that this server has adopted."""
        left = []
        with suppress(ProcessLookupError, PermissionError):
            # It raises if the group is empty: then there is nothing to search.
            os.killpg(child.pid, 0)
            left = system.group_members(child.pid)
        # While ranks run, an adopted process may still serve one of them.
        if not self.children_of(child.number):
            left += [pid for pid in self.adopted() if pid not in left]
        return left

    def kill_leftovers(self, child: _Rank, left: list[int]) -> Sequence[int]:
        for pid in left:
            signal_group(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        ends.wait_until_gone(left)
        return ()

    # -- work while there is nothing else to do

    def _preload_all(self, modules: Iterable[str], at_once: bool) -> None:
        for name in modules:
            if name in sys.modules:
                continue
            if at_once:
                self._preload(name)
            else:
                self.loop.when_idle(partial(self._preload, name))

    def _preload(self, name: str) -> None:
        """Import a module. If that leaves threads behind, this process forks no more ranks."""
        from torch_testing_ext._machine import accelerators
        from torch_testing_ext._torch import imported_garbage

        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"torch_testing_ext: importing {name} failed: {summarize(error)}", file=sys.stderr, flush=True)
        # A rank that looks for garbage would otherwise look through it: a tenth of a second for torch's compiler.
        imported_garbage.exempt_imported(garbage=None)
        why = accelerators.check_to_fork()
        if why:
            self.loop.drop_idle()
            self._unsafe = f"importing {name} left the process unsafe to fork: {why}"


def _has_answered(link: socket.socket, answer: bytes) -> bool:
    """Whether the rank has given this answer, or closed its end. Other bytes are signals that the test handles."""
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
    # The first may arrive in pieces.
    while not messages:
        messages = client.receive()
    (first,) = messages
    assert isinstance(first, Serve)
    sys.argv[:] = first.argv
    sessions.start_session(first.parent, signal.SIGTERM)
    begin(client, first)


def begin(client: Channel[ToServer], about: Serve, inherited: Any = None) -> NoReturn:
    """Serve, in this process's own session. The first message is Hello: whether this process is safe to fork."""
    try:
        system.adopt_orphans()
        unsafe: str | None = None
        in_use = False
        if about.method is not StartMethod.SPAWN:
            unsafe, in_use = _become_fork_server(about)
        client.send(Hello(unsafe, in_use))
        ForkServer(client, about, inherited).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_fork_server(about: Serve) -> tuple[str | None, bool]:
    """Prepare to be forked. Returns the reason if this process is not safe to fork, and whether it is an accelerator.

    After a fork of the client, it is the client that looks at the threads which this process lacks.
    """
    from torch_testing_ext._machine import accelerators, random_state
    from torch_testing_ext._torch import imported_garbage
    from torch_testing_ext._torch.groups import watched_groups

    is_fresh = about.method is StartMethod.FORK_FRESH
    if is_fresh:
        about.subject.resolve()
    random_state.prepare_to_seed()
    watched_groups.forget_groups()
    imported_garbage.exempt_imported(garbage=None)
    why_in_use = accelerators.unsafe_to_fork()
    unsafe = why_in_use
    if not unsafe and is_fresh:
        unsafe = accelerators.check_to_fork()
    return unsafe, why_in_use is not None
