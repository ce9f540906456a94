"""The processes of a unit on this machine: the channels of its nanny and its worker, and the files that they write."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from torch_testing_ext._process import messages
from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.logs import read_ends
from torch_testing_ext._process.loop import EventLoop, Timer
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext.launch import hang

from ..model import RankLog
from ..processes.file_handle import FileHandle
from ..processes.worker_messages import (
    EndWorker,
    FromNanny,
    FromWorker,
    KillWorker,
    MeasureMemory,
    MemoryMeasured,
    StacksTaken,
    TakeStacks,
    UnitSpec,
    WorkerBroke,
    WorkerEnded,
)

# A nanny that takes longer to end its unit is stuck.
NANNY_TIMEOUT = 10.0
_RANK_FILE = re.compile(r"rank(\d+)\.(log|stacks)$")
# The process that has written a file of stacks, by the file's name; a rank's file is named after its rank.
_PROCESS_OF = {"stacks": "the test's process"}


class UnitFiles:
    """The files that the processes of a unit write, read as they grow."""

    def __init__(self, spec: UnitSpec):
        self._spec = spec
        self._read: dict[Path, int] = {}  # how much of each has been read as new

    def _new(self, file: Path) -> str:
        size = file.stat().st_size if file.exists() else 0
        seen, self._read[file] = self._read.get(file, 0), size
        return read_ends(file, seen, size)

    def new_output(self) -> str:
        """The output since the last call."""
        return self._new(self._spec.log)

    def new_stacks(self) -> str:
        """The stacks that its process and its ranks have written since the last call."""
        files = [self._spec.stacks, *sorted(self._spec.ranks.glob("*/rank*.stacks"))]
        found = ((file, hang.tidy(self._new(file))) for file in files)
        return "\n\n".join(f"{_PROCESS_OF.get(file.stem, file.stem)}:\n{new}" for file, new in found if new)

    def stacks(self) -> str:
        """All that the unit's own process has written of its stacks."""
        return hang.tidy(read_ends(self._spec.stacks))

    def output(self, start: int, end: int | None) -> str:
        return read_ends(self._spec.log, start, end)

    def rank_logs(self, directories: Iterable[str]) -> tuple[RankLog, ...]:
        """The logs and stacks of each rank, from all directories with files of ranks of one test."""
        found: dict[int, dict[str, str]] = {}
        for directory in directories:
            for file in sorted((self._spec.ranks / directory).rglob("rank*")):
                if match := _RANK_FILE.match(file.name):
                    texts = found.setdefault(int(match[1]), {"log": "", "stacks": ""})
                    texts[match[2]] += read_ends(file)
        return tuple(RankLog(rank, texts["log"], hang.tidy(texts["stacks"])) for rank, texts in sorted(found.items()))

    def message_left(self) -> list[FromWorker]:
        """The message that a worker could only leave in a file."""
        if not self._spec.broke.exists():
            return []
        return [messages.from_json(self._spec.broke.read_text(), messages.by_name(WorkerBroke))]

    def remove(self) -> None:
        shutil.rmtree(self._spec.directory, ignore_errors=True)


class ProcessesListener(Protocol):
    """Receives what the processes of a unit say. Nothing comes after their end."""

    def worker_said(self, message: FromWorker) -> None: ...
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
        self.files = UnitFiles(spec)
        self._stacks_wanted: list[Callable[[str], object]] = []
        self._memory_wanted: list[Callable[[int], object]] = []
        self._backstop: Timer | None = None
        self._over = False
        self._nanny_is_gone = False
        with ExitStack() as on_failure:
            on_failure.callback(self.files.remove)
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

    def ask_for_stacks(self, answer: Callable[[str], object]) -> None:
        """Ask for the stacks of all processes of the unit, as far as they have not been read."""
        self._stacks_wanted.append(answer)
        if self._nanny_is_gone:
            self.stacks_taken()
        else:
            self._nanny.send(TakeStacks())

    def stacks_taken(self) -> None:
        """Answer everything that has asked for stacks: there will be no more of them."""
        wanted, self._stacks_wanted = self._stacks_wanted, []
        stacks = self.files.new_stacks() if wanted else ""
        for answer in wanted:
            answer(stacks)

    def measure_memory(self, answer: Callable[[int], object]) -> None:
        """Ask for the memory of all processes of the unit; there is no answer if they end before."""
        self._memory_wanted.append(answer)
        self._nanny.send(MeasureMemory())

    # -- reports

    def _receive_from_worker(self) -> None:
        for message in self._receive(self._worker) or ():
            self._listener.worker_said(message)

    def _receive_from_nanny(self) -> None:
        received = self._receive(self._nanny)
        if received is None:
            self._nanny_is_gone = True
            self.stacks_taken()
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
                self.stacks_taken()
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
        return [*self._worker.receive_available(), *self.files.message_left()]

    def close(self) -> None:
        if self._backstop is not None:
            self._backstop.cancel()
        for channel in (self._nanny, self._worker):
            self._loop.forget(channel)
            channel.close()
