"""The fork server: its messages, the process, and how it starts ranks."""

import enum
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from torch_testing_ext._process import ends, interpreters, sessions, system
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.fork_host import Child, Exit, ForkHost
from torch_testing_ext._process.messages import LineBuffer, unexpected
from torch_testing_ext._process.signals import signal_group

from . import in_rank as in_rank
from .in_rank import Job, Named, UnknownName
from .own_report import AccountFile, now, summarize

# --------------------------------------------------------------------------------------------------------------------
# The messages between the fork server and its client, the process that needs ranks.


class StartMethod(enum.Enum):
    """The way in which ranks start."""

    FORK = "fork"  # forked from a fork server that is forked from the main process
    FORK_FRESH = "fork-fresh"  # forked from a fork server that is a new interpreter and has imported the test module
    SPAWN = "spawn"  # each rank is a new interpreter


@dataclass(frozen=True)
class Serve:
    """All that a fork server has to know, and the first message to one that is a new interpreter.

    `directory` belongs to the session of the client, whose pid is `parent`: the server removes it if the client ends
    without having removed it.
    """

    directory: Path
    method: StartMethod
    parent: int
    argv: tuple[str, ...]
    subject: Named


@dataclass(frozen=True)
class Launch:
    """Start all ranks of a pickled job. Answered by Started or StartFailed."""

    run: int
    job: bytes


@dataclass(frozen=True)
class Restart:
    """Start one rank of a run again, which has ended, with a pickled job. Answered by Restarted or StartFailed."""

    run: int
    rank: int
    job: bytes


@dataclass(frozen=True)
class Signal:
    """Signal all ranks of a run that are still running, with all processes in their groups; or one rank alone."""

    run: int
    number: int
    rank: int | None = None


@dataclass(frozen=True)
class Dump:
    """Have ranks write their stacks and flight recorders. Answered by Dumped, at the latest after `timeout`."""

    run: int
    ranks: tuple[int, ...]
    timeout: float


@dataclass(frozen=True)
class Probe:
    """Have ranks of a run write their collectives and the state of their threads. There is no answer."""

    run: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Preload:
    """Follow preload hints, so that the next ranks need not: at once, or when there is nothing else to do."""

    modules: tuple[str, ...]
    at_once: bool = False


@dataclass(frozen=True)
class Quit:
    """End, together with everything that the server has started."""


ToServer: TypeAlias = Serve | Launch | Restart | Signal | Dump | Probe | Preload | Quit


@dataclass(frozen=True)
class Hello:
    """The fork server is ready, or not safe to fork for the reason `unsafe`; `in_use`: as an accelerator is in use."""

    unsafe: str | None
    in_use: bool = False


@dataclass(frozen=True)
class Started:
    """All ranks of a run have started."""

    run: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Restarted:
    """A rank of a run has started again."""

    run: int
    rank: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """A rank has ended, together with everything that it had started."""

    run: int
    rank: int
    exit: Exit


@dataclass(frozen=True)
class Dumped:
    """The ranks of a run have written their stacks and flight recorders, or took too long."""

    run: int


@dataclass(frozen=True)
class StartFailed:
    """The ranks of a run could not be started. `needs_new_server`: another server could start them."""

    run: int
    why: str
    needs_new_server: bool


FromServer: TypeAlias = Hello | Started | Restarted | Exited | Dumped | StartFailed


# --------------------------------------------------------------------------------------------------------------------
# Starting a rank: where its output goes, and how a new interpreter becomes one.


@dataclass
class StreamedOutput:
    """Output shown as it arrives: read from a pipe, written to the log, copied to stderr line by line."""

    pipe: int
    log: int
    rank: int
    lines: LineBuffer = field(default_factory=LineBuffer)

    def copy(self) -> bytes:
        """Show the lines that are complete by the next piece of output, and return it: a loop would delay all else."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self.pipe, 1 << 16)
        _write_what_fits(self.log, data)
        for line in self.lines.add(data):
            self._print(line)
        return data

    def finish(self) -> None:
        """Show the rest: the rank has ended."""
        while self.copy():
            pass
        (unfinished,) = self.lines.add(b"\n")
        if unfinished:
            self._print(unfinished)
        self.close()

    def close(self) -> None:
        os.close(self.pipe)
        os.close(self.log)

    def _print(self, line: bytes) -> None:
        _write_what_fits(2, b"[rank%d] %s\n" % (self.rank, line))


def _write_what_fits(fd: int, data: bytes) -> None:
    """Write, ignoring errors: a full disk, or a closed pipe, must not end the process that watches the ranks."""
    with suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def open_streams(
    job: Job, rank: int, of_rank: ExitStack, of_server: ExitStack
) -> tuple[int | None, StreamedOutput | None]:
    """Open the target of a rank's stdout and stderr: its log, or a pipe to this process if they are also shown.

    The rank being debugged keeps those of this process (None), so that it has the terminal. The stacks close the
    descriptors that only the rank needs, and those that only this process needs.
    """
    if job.debug_rank == rank:
        return None, None
    log = os.open(job.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if not job.stream:
        of_rank.callback(os.close, log)
        return log, None
    of_server.callback(os.close, log)
    reading, writing = os.pipe()
    of_server.callback(os.close, reading)
    of_rank.callback(os.close, writing)
    os.set_blocking(reading, False)
    return writing, StreamedOutput(reading, log, rank)


def spawn(job: Job, rank: int, account: AccountFile, link: socket.socket, stream: int | None) -> int:
    """Start a rank as a new interpreter; returns its pid."""
    job_file = job.directory / f"job{job.incarnation}"
    if not job_file.exists():
        job_file.write_bytes(pickle.dumps(job))
    words = [str(job_file), str(rank), str(account.fd), str(link.fileno()), str(os.getpid())]
    environ = dict(job.context.environ)
    if job.differs_in_hash:
        environ["PYTHONHASHSEED"] = str(rank + 1)
    to_stream = (
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, stream, 1),
        (os.POSIX_SPAWN_DUP2, stream, 2),
    )
    for fd in (account.fd, link.fileno()):
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawn(
            sys.executable,
            interpreters.command("launch.in_rank", job.context.path, *words),
            environ,
            file_actions=to_stream if stream is not None else (),
            setsigmask=(),
        )
    finally:
        os.set_inheritable(account.fd, False)


# --------------------------------------------------------------------------------------------------------------------
# The fork server: the process that starts ranks and waits for them.
#
# It is the parent of all ranks and adopts the processes that they leave behind, so that it can end them all. If no
# process is safe to fork, the fork server is a plain interpreter that starts each rank as another interpreter.

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
        # While ranks are being started.
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
            case Restart():
                self._restart(message.run, message.rank, pickle.loads(message.job))
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
            why_not = f"{type(error).__name__}: {system.why_refused(error)}"
            self.client.send(StartFailed(run, why_not, needs_new_server=False))

    def _restart(self, run: int, rank: int, job: Job) -> None:
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
            self.client.send(StartFailed(run, f"rank {rank} again: {error}", needs_new_server=False))
            return
        (process,) = self._ranks_of(run, [rank])
        self.client.send(Restarted(run, rank, process.pid))

    def _prepare_for(self, job: Job) -> None:
        """Do once what each rank inherits. Raises UnknownName if the client has to make another server."""
        if self._unsafe:
            raise UnknownName(self._unsafe)
        self._launches += 1
        if self._about.method is not StartMethod.SPAWN:
            self._collapse(at_once=job.world_size >= MANY_RANKS)
            job.context.apply()
            in_rank.prepare_to_sanitize(bool(job.sanitize))
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
            self._accounts.extend(AccountFile.open(job.account(rank)) for rank in range(job.world_size))
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

                def run_rank() -> NoReturn:
                    of_server.close()
                    self._close_accounts(account)
                    in_rank.run_and_exit(job, rank, account, theirs, stream, self._inherited)

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
    from torch_testing_ext._machine import accelerators
    from torch_testing_ext._torch import imported_garbage
    from torch_testing_ext._torch.groups import watched_groups

    is_fresh = about.method is StartMethod.FORK_FRESH
    if is_fresh:
        about.subject.resolve()
    accelerators.prepare_to_seed()
    watched_groups.forget_groups()
    imported_garbage.exempt_imported(garbage=None)
    why_in_use = accelerators.unsafe_to_fork()
    unsafe = why_in_use
    if not unsafe and is_fresh:
        unsafe = accelerators.check_to_fork()
    return unsafe, why_in_use is not None
