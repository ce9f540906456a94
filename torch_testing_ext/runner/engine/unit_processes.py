"""The processes of a unit on this machine, at the other end of two channels: that of its nanny and of its worker."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.logs import read_ends
from torch_testing_ext._process.loop import EventLoop, Timer
from torch_testing_ext._process.messages import unexpected

from ..processes.file_handle import FileHandle
from ..processes.unit_spec import UnitSpec
from ..processes.worker_messages import (
    EndWorker,
    FromNanny,
    FromWorker,
    KillWorker,
    MeasureMemory,
    MemoryMeasured,
    StacksTaken,
    TakeStacks,
    WorkerEnded,
)

# A nanny that takes longer to end its unit is stuck.
NANNY_TIMEOUT = 10.0


class ProcessesListener(Protocol):
    """Receives what the processes of a unit say. Nothing comes after their end."""

    def worker_said(self, message: FromWorker) -> None: ...
    def stacks_taken(self) -> None: ...
    def processes_ended(self, end: WorkerEnded) -> None: ...
    def processes_lost(self, how: str) -> None:
        """The nanny has ended without a report, and nothing that the unit started is left."""


class UnitProcesses:
    """Starts the processes of a unit, and ends them."""

    def __init__(
        self,
        file: FileHandle,
        spec: UnitSpec,
        loop: EventLoop,
        listener: ProcessesListener,
        locks: tuple[int, ...] = (),
    ):
        """Raises OSError, and leaves nothing behind, if the system refuses what it needs."""
        self._file = file
        self._spec = spec
        self._loop = loop
        self._listener = listener
        self._memory_wanted: list[Callable[[int], object]] = []
        self._backstop: Timer | None = None
        self._printed = 0  # bytes of the log that have been shown
        self._over = False
        self.nanny_is_gone = False
        with ExitStack() as on_failure:
            on_failure.callback(self.remove_files)
            nanny, theirs_of_nanny = map(on_failure.enter_context, socket_pair())
            worker, theirs_of_worker = map(on_failure.enter_context, socket_pair())
            file.start(spec, theirs_of_nanny, theirs_of_worker, self._gone, locks)
            on_failure.pop_all()
        self._nanny: Channel[FromNanny] = Channel(nanny, FromNanny)
        self._worker: Channel[FromWorker] = Channel(worker, FromWorker)
        loop.listen(self._nanny, self._receive_from_nanny)
        loop.listen(self._worker, self._receive_from_worker)

    # -- requests

    def end(self) -> None:
        """Escalate: SIGTERM, then SIGKILL."""
        self._nanny.send(EndWorker())
        self._expect_end()

    def kill(self) -> None:
        self._nanny.send(KillWorker())
        self._expect_end()

    def _expect_end(self) -> None:
        if self._backstop is None and not self._over:
            self._backstop = self._loop.after(NANNY_TIMEOUT, lambda: self._file.kill(self._spec.number))

    def take_stacks(self) -> None:
        self._nanny.send(TakeStacks())

    def measure_memory(self, answer: Callable[[int], object]) -> None:
        """Ask for the memory of all processes of the unit; there is no answer if they end before."""
        self._memory_wanted.append(answer)
        self._nanny.send(MeasureMemory())

    def new_output(self) -> str:
        """The output since the last call."""
        size = self._spec.log.stat().st_size if self._spec.log.exists() else 0
        seen, self._printed = self._printed, size
        return read_ends(self._spec.log, seen, size)

    # -- reports

    def _receive_from_worker(self) -> None:
        for message in self._receive(self._worker) or ():
            self._listener.worker_said(message)

    def _receive_from_nanny(self) -> None:
        received = self._receive(self._nanny)
        if received is None:
            self.nanny_is_gone = True
            self._listener.stacks_taken()
            return
        for message in received:
            self._on_nanny_message(message)

    def _receive(self, channel: Channel[Any]) -> list[Any] | None:
        """The messages that have come; None, once, at the end."""
        try:
            return channel.receive()
        except EOFError:
            self._loop.forget(channel)
            return None

    def _on_nanny_message(self, message: FromNanny) -> None:
        match message:
            case StacksTaken():
                self._listener.stacks_taken()
            case MemoryMeasured(used):
                wanted, self._memory_wanted = self._memory_wanted, []
                for answer in wanted:
                    answer(used)
            case WorkerEnded():
                self._over = True
                self._listener.processes_ended(message)
            case _:
                unexpected(message)

    def _gone(self, how: str) -> None:
        """The nanny has ended, and nothing that the unit started is left."""
        for message in self._nanny.receive_available() if not self._over else ():
            self._on_nanny_message(message)
        if not self._over:
            self._over = True
            self._listener.processes_lost(how)

    # -- the end

    def last_messages(self) -> list[FromWorker]:
        """Receive the messages of the worker that have not been received yet."""
        return self._worker.receive_available()

    def close(self) -> None:
        if self._backstop is not None:
            self._backstop.cancel()
        for channel in (self._nanny, self._worker):
            self._loop.forget(channel)
            channel.close()

    def remove_files(self) -> None:
        shutil.rmtree(self._spec.directory, ignore_errors=True)
