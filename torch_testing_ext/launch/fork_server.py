"""The process that starts ranks and waits for them: the zygote, or a bare interpreter where nothing can be forked.

One thread, one loop, no clock. It is the parent of all ranks and adopts what they leave behind, so that nothing
they start can get lost; and it ends all of it when the process that it works for is gone.
"""

from __future__ import annotations

import enum
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext._process import fork_safety, system

from . import rank as rank_room
from .job import Job, Named, UnknownName
from .report import AccountFile, Exit, now
from .starting import StreamedOutput, open_streams, read_available, spawn

# From this launch on it pays to gather the memory into huge pages: a fork then copies far fewer page tables.
COLLAPSE_AT = 2


@dataclass
class _Rank:
    run: int
    rank: int
    pid: int
    link: socket.socket
    shown: StreamedOutput | None = None


class StartMethod(enum.Enum):
    FORK = "forked off the main process"
    FORK_FRESH = "a new interpreter that imported the test module"
    SPAWN = "a new interpreter that imports nothing and starts each rank as another one"


@dataclass
class ForkServer:
    client: Connection
    directory: Path  # of the whole session; removed when the client ends without having done so
    kind: StartMethod
    parent: int  # the client's pid
    ranks: dict[int, _Rank] = field(default_factory=dict)  # by pid, until reaped
    chores: deque[Callable[[], None]] = field(default_factory=deque)  # for when there is nothing else to do
    pens: list[AccountFile] = field(default_factory=list)  # while ranks are being started
    wakeups: tuple[int, int] = (-1, -1)
    launches: int = 0
    unfit: str | None = None
    client_is_gone: bool = False

    def serve(self) -> NoReturn:
        try:
            with wakeups() as self.wakeups:
                while self._step(self.wakeups[0]):
                    pass
        except BaseException:
            traceback.print_exc()
        finally:
            self._end_all()
            if self.client_is_gone or os.getppid() != self.parent:
                shutil.rmtree(self.directory, ignore_errors=True)
            os._exit(0)

    def _step(self, wakeup: int) -> bool:
        shown = {one.shown.pipe: one.shown for one in self.ranks.values() if one.shown}
        ready = wait([self.client, wakeup, *shown], timeout=0 if self.chores else None)
        for pipe in shown.keys() & set(ready):
            shown[pipe].copy()
        if wakeup in ready:
            if signal.SIGTERM in drain(wakeup):
                return False
            self._reap()
        if self.client in ready:
            return self._obey()
        if not ready and self.chores:
            self.chores.popleft()()
        return True

    def _obey(self) -> bool:
        try:
            order, *details = self.client.recv()
        except (EOFError, OSError):
            self.client_is_gone = True  # it would have said that it ends
            return False
        if order == "quit":
            return False
        getattr(self, f"_do_{order}")(*details)
        return True

    def _tell(self, *message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.client.send(message)

    # -- orders

    def _do_launch(self, run: int, job: Job) -> None:
        """Start all ranks of a job; answers `started` with their pids, `unknown` or `failed`."""
        try:
            self._get_ready_for(job)
            self._start_all(run, job)
        except UnknownName as why:
            self._tell("unknown", run, str(why))
        except OSError as error:
            self._end(run, signal.SIGKILL)
            self._tell("failed", run, f"{type(error).__name__}: {error}")

    def _do_kill(self, run: int, ranks: list[int] | None, number: int) -> None:
        """Signal ranks and their groups; all ranks of the run where none are named."""
        for one in self._of(run, ranks):
            signal_group(one.pid, number)

    def _do_signal(self, run: int, rank: int, number: int) -> None:
        """Signal one rank and nothing that it started."""
        for one in self._of(run, [rank]):
            os.kill(one.pid, number)

    def _do_dump(self, run: int, ranks: list[int], patience: float) -> None:
        """Have ranks write stacks and flight recorder to their files; answers `dumped` when all have, or at the end of
        our patience (a rank that holds the GIL never answers for its flight recorder)."""
        deadline = now() + patience
        chosen = self._of(run, ranks)
        for one in chosen:
            signal_group(one.pid, signal.SIGCONT)  # a stopped process answers nothing
        self._ask(chosen, lambda one: os.kill(one.pid, system.DUMP_STACKS), rank_room.STACKS_DONE, deadline)
        self._ask(chosen, lambda one: one.link.send(rank_room.ASK_RECORDER), rank_room.RECORDER_DONE, deadline)
        self._tell("dumped", run)

    def _ask(self, ranks: list[_Rank], ask: Callable[[_Rank], object], answer: bytes, deadline: float) -> None:
        waiting = []
        for one in ranks:
            with suppress(OSError):
                ask(one)
                waiting.append(one.link)
        while waiting and (ready := wait(waiting, timeout=max(0.0, deadline - now()))):
            for link in ready:
                if _has_answered(link, answer):  # type: ignore[arg-type]
                    waiting.remove(link)  # type: ignore[arg-type]

    def _do_preload(self, modules: list[str]) -> None:
        self.chores.extend(partial(self._import, name) for name in modules if name not in sys.modules)

    # -- births

    def _get_ready_for(self, job: Job) -> None:
        if self.unfit:
            raise UnknownName(self.unfit)  # the client makes another server
        self.launches += 1
        if self.launches == 1 and self.kind is not StartMethod.SPAWN:
            self.chores.append(self._warm_up)
        if self.launches == COLLAPSE_AT and self.kind is not StartMethod.SPAWN:
            self.chores.extend(partial(system.collapse, *region) for region in system.memory_regions())
        if self.kind is not StartMethod.SPAWN:
            job.context.apply()  # here, once: each rank is born with them
        for thing in (job.body, job.subject):
            if self.kind is StartMethod.FORK:
                thing.inherited()
            elif self.kind is StartMethod.FORK_FRESH:
                thing.resolve()

    def _start_all(self, run: int, job: Job) -> None:
        try:
            # All files first: a full disk is known before any rank has started.
            self.pens.extend(AccountFile.open(job.account(rank)) for rank in range(job.world_size))
            with held_back():
                for rank, pen in enumerate(self.pens):
                    self._start(run, job, rank, pen)
        finally:
            for pen in self.pens:
                pen.close()
            self.pens.clear()
        self._tell("started", run, [one.pid for one in self._of(run)])

    def _start(self, run: int, job: Job, rank: int, pen: AccountFile) -> None:
        with ExitStack() as owner:
            ours, theirs = socket.socketpair()
            owner.enter_context(theirs)
            ours.setblocking(False)
            failed = owner.enter_context(ExitStack())  # closed only where no rank comes of it
            failed.callback(ours.close)
            stream, shown = open_streams(job, rank, owner)
            if shown is not None:
                failed.callback(shown.close)
            if self.kind is StartMethod.SPAWN:
                pid = spawn(job, rank, pen, theirs, stream)
            else:
                pid = self._fork(job, rank, pen, ours, theirs, stream)
            failed.pop_all()
            self.ranks[pid] = _Rank(run, rank, pid, ours, shown)

    def _fork(
        self, job: Job, rank: int, pen: AccountFile, ours: socket.socket, theirs: socket.socket, stream: int | None
    ) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            system.die_with(parent, signal.SIGKILL)
            ours.close()
            self._close_inherited(pen)
            rank_room.live(job, rank, pen, theirs, stream)
        finally:
            os._exit(1)

    def _close_inherited(self, own: AccountFile) -> None:
        """In a newborn: what belongs to the server and to other ranks."""
        self.client.close()
        signal.set_wakeup_fd(-1)
        for fd in self.wakeups:
            os.close(fd)
        for pen in self.pens:
            if pen is not own:
                pen.close()
        for sibling in self.ranks.values():
            sibling.link.close()
            if sibling.shown is not None:
                sibling.shown.close()

    # -- deaths

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            at = now()
            one = self.ranks.pop(pid, None)
            if one is not None:
                self._bury(one, status, at)

    def _bury(self, one: _Rank, status: int, at: float) -> None:
        leftovers = self._end_leftovers(one)
        if one.shown is not None:
            one.shown.finish()
        one.link.close()
        self._tell("exited", one.run, one.rank, Exit(status, at, leftovers))

    def _end_leftovers(self, one: _Rank) -> tuple[str, ...]:
        """End what a rank left running: its group, and what moved out of the group and so became our child."""
        found = []
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.pid, 0)  # no group, no search
            found = system.group_members(one.pid)
        if not self._of(one.run):  # before that, what was adopted may still serve a rank
            found += [pid for pid in self._adopted() if pid not in found]
        names = tuple(system.describe(pid) for pid in found)
        for pid in found:
            signal_group(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.pid, signal.SIGKILL)
        see_to_their_end(found)
        return names

    def _adopted(self) -> list[int]:
        return [pid for pid in system.children(os.getpid()) if pid not in self.ranks]

    def _end(self, run: int, number: int) -> None:
        for one in self._of(run):
            signal_group(one.pid, number)

    def _end_all(self) -> None:
        """Until no child is left: what a rank had moved out of its group becomes ours when the rank is dead."""
        for one in self.ranks.values():
            signal_group(one.pid, signal.SIGKILL)
        while children := system.children(os.getpid()):
            for pid in children:
                signal_group(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _of(self, run: int, ranks: list[int] | None = None) -> list[_Rank]:
        chosen = [one for one in self.ranks.values() if one.run == run and (ranks is None or one.rank in ranks)]
        return sorted(chosen, key=lambda one: one.rank)

    # -- imports in the shadow of other work

    def _warm_up(self) -> None:
        from torch_testing_ext import _torch

        self._do_safely(_torch.warm_up, "warming up")

    def _import(self, name: str) -> None:
        self._do_safely(partial(importlib.import_module, name), f"importing {name}")

    def _do_safely(self, chore: Callable[[], object], doing: str) -> None:
        """Do something that may leave threads behind; then no rank is forked off this process any more."""
        with suppress(Exception):
            chore()
        if why := fork_safety.prepare_to_fork() or fork_safety.check_after_fork():
            self.chores.clear()
            self.unfit = f"{doing} left the process unfit: {why}"


def see_to_their_end(pids: list[int], patience: float = 1.0) -> None:
    """Wait until processes that were killed are gone, so that a run that is over has left none; but not for ever."""
    deadline = now() + patience
    for pid in pids:
        with suppress(OSError, AttributeError):  # gone already; no such call on this system
            gone = os.pidfd_open(pid)
            try:
                wait([gone], max(0.0, deadline - now()))
            finally:
                os.close(gone)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def signal_group(pid: int, number: int) -> None:
    """Signal a rank and its group, once each; the rank alone where it has not made its group yet."""
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


def _has_answered(link: socket.socket, answer: bytes) -> bool:
    """Has the rank given this answer, or hung up? What else it sends are signals that the test has handlers for."""
    try:
        said = link.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not said or answer in said


@contextmanager
def held_back() -> Iterator[None]:
    """No signal meets a newborn before it has handlers of its own: by ours it would write to our wake-up pipe, and
    what it wrote would be taken for a signal to us. It lifts the block itself."""
    signals = {signal.SIGTERM, signal.SIGCHLD, system.DUMP_STACKS}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


@contextmanager
def wakeups() -> Iterator[tuple[int, int]]:
    """A pipe that becomes readable when a child ends or SIGTERM arrives."""
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A new interpreter starts without handlers: to ask it where it is, before it can answer, must not kill it.
    signal.signal(system.DUMP_STACKS, signal.SIG_IGN)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        yield reading, writing
    finally:
        signal.set_wakeup_fd(-1)


def drain(fd: int) -> bytes:
    data = b""
    while more := read_available(fd):
        data += more
    return data


def main() -> NoReturn:
    """The life of a server that is a new interpreter: `python -c "... server.main()"`; its client speaks first."""
    client = Connection(int(sys.argv[1]))
    first: FirstWords = client.recv()
    sys.argv[:] = first.argv
    begin(client, first.directory, first.kind, first.parent, first.subject)


@dataclass(frozen=True)
class FirstWords:
    directory: Path
    kind: StartMethod
    parent: int
    argv: tuple[str, ...]
    subject: Named


def begin(
    client: Connection, directory: Path, kind: StartMethod, parent: int, subject: Named | None = None
) -> NoReturn:
    """Serve until told to quit. First says whether this process is fit for it: `hello` with None or the reason."""
    try:
        os.setsid()
        # SIGTERM rather than SIGKILL: there may be ranks to end first.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        system.die_with(parent, signal.SIGTERM)
        system.adopt_orphans()
        reason = None if kind is StartMethod.SPAWN else _become_zygote(kind, subject)
        client.send(("hello", reason))
        ForkServer(client, directory, kind, parent).serve()
    except BrokenPipeError:
        pass  # the client did not wait: it saw for itself that this process is not fit
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_zygote(kind: StartMethod, subject: Named | None) -> str | None:
    from torch_testing_ext import _torch
    from torch_testing_ext._machine import accelerators

    if kind is StartMethod.FORK_FRESH:
        assert subject is not None
        subject.resolve()
    # Nothing that lives now will be collected in a rank: keeps the collector from writing to shared pages.
    gc.freeze()
    if kind is StartMethod.FORK_FRESH and (why := fork_safety.prepare_to_fork() or fork_safety.check_after_fork()):
        return why
    if _torch.accelerator_is_in_bad_fork() and accelerators.device_may_exist():
        return "an accelerator was asked for before the ranks were forked"
    return None
