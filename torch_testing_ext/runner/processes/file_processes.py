"""The processes of all test files, and what is found in these, as run_test.py sees them. Never imports torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process import system
from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.logs import tail

from ..model import Attempt, Test
from ..options.options import CannotRun
from .file_handle import FileHandle, FileState
from .worker_messages import CountDevices, DevicesCounted, LoadAs
from .zygote_client import WarmUp, ZygoteClient

COUNT_TIMEOUT = 200.0  # longer than each of the ways to ask the driver takes
MOST_OPEN = 32  # processes of files that wait for their first unit


@dataclass(frozen=True)
class Discovery:
    """The tests found by importing the test files, and what cannot be run."""

    tests: tuple[Test, ...]  # of a file that skips itself, one that stands for all of them
    broken: tuple[Attempt, ...]  # files that could not be imported
    not_run: tuple[Attempt, ...] = ()  # tests that unittest does not run
    warnings: tuple[str, ...] = ()


class FileProcesses(ZygoteClient):
    """The processes of test files, and the zygote above them: `with FileProcesses(root) as files:`."""

    def __init__(
        self,
        root: Path,
        warm_up: WarmUp | None = None,
        drop_in: bool = False,
        all_marks: bool = False,
        environ: Mapping[str, str] | None = None,
    ):
        """`all_marks`: find tests, too, that pytest's own options deselect by their marks."""
        super().__init__(root, warm_up, drop_in, environ)
        self._load_as = LoadAs(all_marks=all_marks)
        self.torch_version = ""  # known when devices have been counted
        self.devices_seen = DevicesCounted(None, 0)  # known when devices have been counted
        self._files: dict[str, FileHandle] = {}
        self._suspects: deque[FileHandle] = deque()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        super().close()

    def count_devices(self) -> tuple[str | None, int]:
        """The kind of the visible accelerators ("cuda", "hip", "xpu", ...), and their number."""
        ours, theirs = socket_pair()
        channel: Channel[DevicesCounted] = Channel(ours, DevicesCounted)
        answers: list[DevicesCounted] = []
        ended: list[str] = []

        def listen() -> None:
            with suppress(EOFError):
                answers.extend(channel.receive())
            self.loop.forget(channel)

        self.loop.listen(channel, listen)
        with theirs:
            child = self.start_child(CountDevices, ended.append, theirs.fileno())
        until = time.monotonic() + COUNT_TIMEOUT
        while not ended:
            # An answer is enough: a process that the driver blocks may not end.
            if (not self.loop.step(until) and time.monotonic() >= until) or any(one.failure for one in answers):
                self.kill(child)
                break
        channel.close()
        if self.failure is not None:
            raise CannotRun(self.failure)
        if not ended:
            why = answers[0].failure if answers else ""
            raise CannotRun(why or f"the driver of the accelerators has not answered within {COUNT_TIMEOUT:.0f} s")
        if answers and answers[0].failure:
            raise CannotRun(answers[0].failure)
        if not answers:
            raise CannotRun(f"the process that counts accelerators ended without an answer:\n{tail(self._log)}")
        self.torch_version = answers[0].torch
        self.devices_seen = answers[0]
        return answers[0].kind, answers[0].count

    def discover(self, files: Iterable[str], devices: int = 0, jobs: int | None = None) -> Discovery:
        """Import files (relative to the root) and list their tests. `devices`: the number of devices of the run."""
        opened = [self.file(name, devices) for name in files]
        waiting = deque(file for file in opened if file.state is FileState.CLOSED)
        opening: list[FileHandle] = []
        while waiting or opening:
            while waiting and len(opening) < (jobs or system.cores()):
                opening.append(waiting.popleft())
                opening[-1].open()
            self.loop.step()
            opening = [file for file in opening if file.is_importing]
            self._keep_few_open(opened)
        tests = tuple(test for file in opened for test in file.contents.tests)
        broken = tuple(file.contents.broken for file in opened if file.contents.broken is not None)
        not_run = tuple(attempt for file in opened for attempt in file.contents.not_run)
        return Discovery(tests, broken, not_run, self.warnings)

    def _keep_few_open(self, files: Iterable[FileHandle]) -> None:
        """Close processes beyond MOST_OPEN, to save memory. Their files are imported again when their units start."""
        for file in [file for file in files if file.state is FileState.READY][MOST_OPEN:]:
            file.close()

    def _import_again(self, file: FileHandle) -> None:
        """Import a file during whose import the zygote died. One at a time, so that only the culprit dies again."""
        self._suspects.append(file)
        self._import_next_suspect()

    def _import_next_suspect(self) -> None:
        if self._suspects and self._suspects[0].state is FileState.SUSPECT:
            self._suspects[0].open(self._end_suspicion)

    def _end_suspicion(self) -> None:
        self._suspects.popleft()
        self._import_next_suspect()

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(text for file in self._files.values() for text in file.contents.warnings)

    def file(self, name: str, devices: int = 0) -> FileHandle:
        if name not in self._files:
            log = self.directory / f"import{len(self._files)}.log"  # a path may be too long for the name of a file
            self._files[name] = FileHandle(self, name, devices, log, self._load_as, self._import_again)
        return self._files[name]
