"""A worker's reports about the tests and fixtures of its unit, whether unittest or pytest runs them."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process import test_notes
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext.launch import Cause, device_memory

from ..model import COUNTS_AS, Category, DeviceMemory, TestOutcome
from .worker_messages import Began, Ended, FixtureBegan, FixtureEnded, FixtureFailed, FromWorker, NotRun, UnitSpec

# The files of a run have a message of this length whole. Readers of XML refuse texts beyond ten million bytes.
LONGEST_MESSAGE = 4_000_000

Send = Callable[[FromWorker], None]


@dataclass
class UnitReports:
    """Reports what begins and ends in the unit that this process runs, with its output so far."""

    unit: UnitSpec
    send: Send
    _ranks_seen: set[str] = field(default_factory=set)
    _port_in_use: bool = False

    def test_began(self, number: int) -> None:
        device_memory.forget()
        self._port_in_use = False
        self.send(Began(number, time.monotonic(), self._length_of_log()))

    def note_cause(self, cause: Cause) -> None:
        """Note the cause of a failure of the test or fixture that is running."""
        self._port_in_use |= cause is Cause.PORT_IN_USE

    def test_ended(self, number: int, outcome: TestOutcome, ended: FailureView | str, want: str | None) -> None:
        """`ended`: the failure, or a text. A failure names the command that runs the test alone."""
        notes = test_notes.take()
        memory = device_memory.highest([*notes.memory, device_memory.of_this_process()])
        if COUNTS_AS[outcome] is Category.FAILED and isinstance(ended, str) and ended:
            ended = FailureView.of_text(ended)
        message, failure = (ended, None) if isinstance(ended, str) else ("", ended)
        if failure is not None and not failure.rerun_command:
            failure = replace(failure, rerun_command=self.unit.commands[number])
        self.send(
            Ended(
                number,
                time.monotonic(),
                outcome,
                cut_middle(message, LONGEST_MESSAGE),
                want,
                self._length_of_log(),
                self._new_rank_directories(),
                memory and DeviceMemory(*memory),
                notes.warnings,
                self._port_in_use,
                notes.left_running,
                failure and failure.cut(LONGEST_MESSAGE),
            )
        )

    def not_run(self, number: int, outcome: TestOutcome, told: FailureView | str, want: str | None = None) -> None:
        message, failure = (told, None) if isinstance(told, str) else ("", told)
        self.send(NotRun(number, time.monotonic(), outcome, message, want, self._port_in_use, failure))

    def fixture_began(self, name: str, needed_by: tuple[int, ...] = ()) -> None:
        """`needed_by`: the tests that cannot run without it."""
        self._port_in_use = False
        self.send(FixtureBegan(name, time.monotonic(), needed_by))

    def fixture_ended(self) -> None:
        self.send(FixtureEnded(test_notes.take_left_running()))

    def fixture_failed(self, told: FailureView | str) -> None:
        """A tear-down has failed, or anything else after a test."""
        failure = FailureView.of_text(told) if isinstance(told, str) else told
        self.send(FixtureFailed(failure.cut(LONGEST_MESSAGE)))

    def _length_of_log(self) -> int:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a test may have closed or replaced them: that is no failure
                stream.flush()
        return self.unit.log.stat().st_size

    def _new_rank_directories(self) -> tuple[str, ...]:
        """The directories with the files of the ranks that were started since the last call."""
        new: list[str] = []
        with suppress(FileNotFoundError):  # made by the first test that starts ranks
            new = sorted(set(os.listdir(self.unit.ranks)) - self._ranks_seen)
        self._ranks_seen.update(new)
        return tuple(new)
