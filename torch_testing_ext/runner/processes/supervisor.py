"""The supervisor: the process that watches a unit and owns everything that the unit starts.

It watches one unit after another, as its client asks. It adopts the processes that a unit's processes leave behind, in
whatever group or session they are. It reports the end of the worker only when no process of the unit is left, so that
its devices are free by then. If its client is gone, it ends everything at once. If the supervisor itself is killed, the
kernel ends the worker, and the supervisor's parent ends the rest.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NoReturn

from torch_testing_ext._process import ends, system
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.fork_host import Child, Exit, ForkHost
from torch_testing_ext._process.logs import content_of
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._process.signals import signal_group
from torch_testing_ext.launch import grace_periods

from . import fork_parent_messages, supervisor_messages, unit_spec, worker_messages

# If a worker was killed, its ranks are not ended by it but by the fork server.
GRACE_FOR_ORPHANS = 1.0
# Stacks are complete when their files have grown, and then not for this long: no process reports that it has written
# them.
_QUIET = 0.05
# Python code answers as soon as the machine lets it; what waits in C does not, and answers the next signal.
_FOR_PYTHON = 0.3

# Runs the worker of a unit with its channel; the last argument is the descriptor of its log.
Start = Callable[[unit_spec.UnitSpec, Channel[fork_parent_messages.Nothing], int], NoReturn]


def run_and_exit(request: fork_parent_messages.StartUnit, start: Start) -> NoReturn:
    """Watch a unit, and then those that the client asks for."""
    fd, *more = request.fds
    supervisor = Supervisor(Channel.on(fd, supervisor_messages.ToSupervisor), start)
    supervisor.watch(request.unit, *more)
    supervisor.serve()
    os._exit(0)


class Supervisor(ForkHost[supervisor_messages.ToSupervisor, Child]):
    """Starts the workers of units, one after another, watches them, and ends the processes that they leave."""

    grace_for_orphans = GRACE_FOR_ORPHANS

    def __init__(self, client: Channel[supervisor_messages.ToSupervisor], start: Start):
        super().__init__(client)
        self._start = start
        self._unit: unit_spec.UnitSpec
        self._locks: list[int] = []

    @property
    def _worker(self) -> int:
        """The pid of the worker, its only child; 0: none."""
        return next(iter(self.children), 0)

    def watch(self, unit: unit_spec.UnitSpec, channel: int, *locks: int) -> None:
        """Start the worker of a unit, whose locks are held as long as a process has them."""
        self._unit = unit
        self._locks = list(locks)
        to_worker: Channel[fork_parent_messages.Nothing] = Channel.on(channel, fork_parent_messages.Nothing)
        self.client.send(supervisor_messages.SupervisorWatches(os.getpid()))
        pid = self.fork(lambda: self._be_worker(to_worker))
        self.children[pid] = Child(unit.number, pid)
        to_worker.close()

    def _be_worker(self, channel: Channel[fork_parent_messages.Nothing]) -> NoReturn:
        self._release_devices()
        try:
            # A test that runs at the same time may have emptied the folder for temporary files.
            self._unit.directory.mkdir(parents=True, exist_ok=True)
            log = os.open(self._unit.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            channel.send(worker_messages.WorkerBroke(f"the log of its process cannot be created: {error}"))
            os._exit(1)
        self._start(self._unit, channel, log)

    def _release_devices(self) -> None:
        for fd in self._locks:
            os.close(fd)
        self._locks = []

    def on_end(self, child: Child, end: Exit) -> None:
        self._release_devices()
        self.client.send(supervisor_messages.WorkerEnded(end.status, end.at, end.leftovers))

    def end_all(self) -> None:
        """End the worker and its group at once, and then the rest."""
        if self._worker:
            signal_group(self._worker, signal.SIGKILL)
        super().end_all()

    def on_message(self, message: supervisor_messages.ToSupervisor) -> None:
        """Do what the client asks for."""
        match message:
            case fork_parent_messages.StartUnit():
                self.watch(message.unit, *message.fds)
            case _ if not self._worker:
                # It is about a unit that is over.
                pass
            case supervisor_messages.AboutWorker.TAKE_STACKS:
                self._take_stacks()
            case supervisor_messages.AboutWorker.END:
                self._end()
            case supervisor_messages.AboutWorker.KILL:
                signal_group(self._worker, signal.SIGKILL)
            case _:
                unexpected(message)

    def _end(self) -> None:
        """Escalate: SIGTERM, then SIGKILL."""

        def has_ended(seconds: float) -> bool:
            return ends.has_ended(self._worker, seconds)

        def send(number: int) -> None:
            signal_group(self._worker, number)

        # A stopped process does not handle SIGTERM.
        send(signal.SIGCONT)
        ends.escalate(has_ended, send, after_sigterm=ends.AFTER_SIGTERM)

    def describe(self, pid: int) -> str:
        return describe(pid)

    def kill_leftovers(self, child: Child, left: list[int]) -> Sequence[int]:
        """End the processes that are still running: SIGTERM, then SIGKILL."""
        for pid in left:
            signal_group(pid, signal.SIGTERM)
        ends.wait_until_gone(left, ends.AFTER_SIGTERM)
        survivors = [pid for pid in left if not system.is_ending(pid)]
        ends.end_children()
        return survivors

    def _take_stacks(self) -> None:
        """Have every process that can write its stacks do so. Answers when all have, or after the time-out."""
        silent = [self._worker, *system.descendants(self._worker)]
        began = time.monotonic()
        for number, timeout in (
            (system.DUMP_STACKS, _FOR_PYTHON),
            (system.DUMP_STACKS_NOW, grace_periods.FOR_STACKS),
        ):
            silent = [pid for pid in silent if _handles(pid, number)]
            if not silent:
                break
            at_first = self._sizes_of_stacks(silent)
            for pid in silent:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, number)
            at_last = self._wait_for_stacks(at_first, began + timeout)
            silent = [pid for pid in silent if at_last.get(pid) == at_first.get(pid)]
        self.client.send(supervisor_messages.StacksTaken())

    def _wait_for_stacks(self, at_first: dict[int, int], deadline: float) -> dict[int, int]:
        """Wait until the files of stacks have grown, and do not grow any more. Returns their sizes."""
        sizes = at_first
        while True:
            time.sleep(_QUIET)
            before = sizes
            sizes = self._sizes_of_stacks(at_first)
            have_grown = all(size > at_first[pid] for pid, size in sizes.items())
            if (have_grown and sizes == before) or time.monotonic() >= deadline:
                return sizes

    def _sizes_of_stacks(self, pids: Iterable[int]) -> dict[int, int]:
        """The sizes of the files to which processes write their stacks, of those that live and have one.

        A rank of a test has a file of its own.
        """
        files = [file.resolve() for file in (*self._unit.ranks.glob("*/*.stacks"), self._unit.stacks)]
        sizes = {}
        for pid in pids:
            opened = set(system.opened(pid))
            for file in files:
                if str(file) in opened:
                    sizes[pid] = len(content_of(file))
                    break
        return sizes


def describe(pid: int) -> str:
    """A process by pid and command line. One that was forked without exec has this process's command line."""
    if system.command_of(pid) == system.command_of(os.getpid()):
        return f"pid {pid}: a fork of the test's process"
    return system.describe(pid)


def _handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal. Without one the signal would kill it."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    mask = int(caught.split()[1], 16)
    bit = 1 << (number - 1)
    return bool(mask & bit)
