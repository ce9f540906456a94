"""The processes of all test files, and what is found in these, as the runner sees them."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch_testing_ext._process import file_reads, system
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.running_coverage import current_coverage
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.load_as import FILES, FilesFound, LoadAs
from torch_testing_ext.runner.model import Attempt, Test, TestEnd, TestId, Unit
from torch_testing_ext.runner.options import CannotRun

from .file_handle import FileHandle, FileState
from .fork_parent_messages import CountDevices, DevicesCounted, FindFiles
from .preloaded_client import PreloadedServerClient

Answer = TypeVar("Answer")
Reads = dict[TestId, dict[str, str] | None]
NOT_LISTED = "the file was selected, and nothing has said which tests it has"
# Longer than each of the ways to ask the driver takes.
COUNT_TIMEOUT = 200.0
# Conftest files may import much.
FIND_TIMEOUT = 120.0
# Processes of files that wait for their first unit.
MOST_OPEN = 32


@dataclass(frozen=True)
class Discovery:
    """The tests found by importing the test files, and what cannot be run."""

    # The tests; a file that skips itself has one that stands for all of them.
    tests: tuple[Test, ...]
    # Files that could not be imported.
    broken: tuple[Attempt, ...]
    # Tests that unittest does not run.
    not_run: tuple[Attempt, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(eq=False)
class FileProcesses(PreloadedServerClient):
    """The processes of test files, and the preloaded server above them: `with FileProcesses(root) as files:`."""

    load_as: LoadAs = field(default_factory=LoadAs)
    # Known when devices have been counted.
    torch_version: str = ""
    _files: dict[str, FileHandle] = field(default_factory=dict)
    _reads: Reads = field(default_factory=dict)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        super().close()

    def count_devices(self) -> DevicesCounted:
        """Ask torch about the accelerators. Raises CannotRun if that cannot be found out."""
        # Killed after its answer, a process that is measured would not save all of its data.
        is_measured = current_coverage() is not None
        answer, how = self._ask(DevicesCounted, CountDevices, COUNT_TIMEOUT, until_end=is_measured)
        if answer is None and how is None:
            raise CannotRun(f"the driver of the accelerators has not answered within {COUNT_TIMEOUT:.0f} s")
        if answer is None:
            raise CannotRun(f"the process that counts accelerators ended without an answer:\n{tail(self._log)}")
        if answer.failure:
            raise CannotRun(answer.failure)
        self.torch_version = answer.torch
        return answer

    def find_files(self, importing: Sequence[str] = (), devices: int = 0) -> FilesFound:
        """Ask pytest which files it collects. Raises CannotRun if no process can be started for that.

        Meanwhile, it imports `importing`: files that pytest probably collects. `devices`: those of the run.
        """
        early = [self.file(name, devices) for name in importing]
        for file in early:
            file.open()
        found = self._find_files()
        for file in early:
            if file.name not in found.paths:
                self._files.pop(file.name).abandon()
        return found

    def _find_files(self) -> FilesFound:
        log = self.directory / f"{FILES}.log"
        request = partial(
            FindFiles, root=str(self.root), load_as=self.load_as, log=str(log), reads=str(log.with_suffix(".reads"))
        )
        answer, how = self._ask(FilesFound, request, FIND_TIMEOUT, until_end=True)
        if answer is not None:
            return answer
        why = f"it {how}" if how is not None else f"it took more than {FIND_TIMEOUT:.0f} s; it was killed"
        return FilesFound((), failure=f"the process in which pytest looks for files ended early: {why}\n{tail(log)}")

    def _ask(
        self, kind: type[Answer], request: Callable[[int], Any], timeout: float, until_end: bool = False
    ) -> tuple[Answer | None, str | None]:
        """The answer of a process of its own, and how that has ended; None for what has not come in time."""
        ours, theirs = socket_pair()
        channel: Channel[Answer] = Channel(ours, kind)
        answers: list[Answer] = []
        ended: list[str] = []
        self.loop.serve(channel, answers.append, lambda: None)
        with theirs:
            child = self.start_child(request, ended.append, theirs.fileno())
        until = time.monotonic() + timeout
        # An answer may be enough: a process that the driver blocks may not end.
        while not (ended or (answers and not until_end)) and time.monotonic() < until:
            self.loop.step(until)
        if not ended:
            self.kill(child)
        self.loop.forget(channel)
        channel.close()
        if self.failure is not None:
            raise CannotRun(self.failure)
        return next(iter(answers), None), next(iter(ended), None)

    def discover(
        self,
        files: Iterable[str],
        devices: int = 0,
        jobs: int | None = None,
        tell: Callable[[list[str], int], object] = lambda importing, left: None,
    ) -> Discovery:
        """Import files (relative to the root) and list their tests. `devices`: the number of devices of the run.

        `tell` gets the names of the files that are being imported, and the number of those that are not yet.
        """
        handles = [self.file(name, devices) for name in files]
        waiting = deque(file for file in handles if file.state is FileState.CLOSED)
        opening = [file for file in handles if file.state is FileState.OPENING]
        most_opening = jobs or system.cores()
        while waiting or opening:
            # Those that were lost with the preloaded server are imported one at a time, so that only the culprit dies
            # again.
            has_died = any(file.lost_imports for file in (*opening, *waiting))
            most_now = 1 if has_died else most_opening
            while waiting and len(opening) < most_now:
                file = waiting.popleft()
                opening.append(file)
                file.open()
            tell([file.name for file in opening], len(waiting) + len(opening))
            self.loop.step()
            waiting.extendleft(file for file in opening if file.state is FileState.CLOSED)
            opening = [file for file in opening if file.state is FileState.OPENING]
            self._keep_few_open(handles)
        return self._discovery(handles)

    def _discovery(self, files: Iterable[FileHandle]) -> Discovery:
        tests: list[Test] = []
        broken: list[Attempt] = []
        not_run: list[Attempt] = []
        for file in files:
            tests += file.contents.tests
            not_run += file.contents.not_run
            if file.contents.broken is not None:
                broken.append(file.contents.broken)
            elif not file.contents.is_listed:
                broken.append(Attempt(Test(TestId(file.name)), TestEnd(TestOutcome.ERROR, NOT_LISTED)))
        return Discovery(tuple(tests), tuple(broken), tuple(not_run), self.warnings)

    def _keep_few_open(self, files: Iterable[FileHandle]) -> None:
        """Close processes beyond MOST_OPEN, to save memory. Their files are imported again when their units start."""
        ready = [file for file in files if file.state is FileState.READY]
        for file in ready[MOST_OPEN:]:
            file.close()

    def note_reads(self, unit: Unit, record: Path) -> None:
        """Keep what a unit has read, before its folder goes."""
        files = self._reads_in(record)
        for test in unit.tests:
            self._reads[test.id] = file_reads.merged(self._reads.get(test.id, {}), files)

    def _reads_in(self, record: Path) -> dict[str, str] | None:
        """The files in a record, without those of this run itself."""
        files = file_reads.read_record(record)
        if files is None:
            return None
        own = f"{self.directory}{os.sep}"
        return {path: content for path, content in files.items() if not path.startswith(own)}

    def reads(self) -> Reads:
        """The files that tests and imports have read so far, by test, or by file of tests; None if that is unknown."""
        reads: Reads = {}
        for name, file in self._files.items():
            reads[TestId(name)] = self._reads_in(file.reads)
        reads[TestId(FILES)] = self._reads_in(self.directory / f"{FILES}.reads")
        reads.update(self._reads)
        return reads

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(text for file in self._files.values() for text in file.contents.warnings)

    def file(self, name: str, devices: int = 0) -> FileHandle:
        if name not in self._files:
            # A path may be too long for the name of a file.
            log = self.directory / f"import{len(self._files)}.log"
            self._files[name] = FileHandle(self, name, devices, log, self.load_as)
        return self._files[name]
