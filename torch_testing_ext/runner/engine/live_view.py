"""The tests that run, as the user sees them: their output as it arrives, and where each of them is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch_testing_ext._process.event_loop import EventLoop, Timer
from torch_testing_ext.runner.events import Event, Output, Running, StatusRequested

from .running_unit import UnitHandle

STREAM_INTERVAL = 0.05
STACKS_TIMEOUT = 3.0


@dataclass
class LiveView:
    """Reports the output of running units, with -s, and their status, when the user asks for it."""

    running: Mapping[int, UnitHandle]
    loop: EventLoop
    report: Callable[[Event], object]
    stream: bool
    _copying: Timer | None = None
    _status: _Status | None = None

    @contextmanager
    def showing_output(self) -> Iterator[None]:
        self._copy_output()
        yield
        if self._copying is not None:
            self._copying.cancel()

    def _copy_output(self) -> None:
        if self.stream:
            for running in self.running.values():
                self.copy_output_of(running)
            self._copying = self.loop.after(STREAM_INTERVAL, self._copy_output)

    def copy_output_of(self, running: UnitHandle) -> None:
        if not self.stream:
            return
        text = running.new_output()
        if text:
            self.report(Output(running.test.id, text))

    def show_status(self) -> None:
        """Report which tests run, and where they are, unless that is being found out already."""
        if self._status is None:
            self._status = _Status(tuple(self.running.values()), self._answer)
            self.loop.after(STACKS_TIMEOUT, self._status.close)
            self._status.ask()

    def _answer(self, event: StatusRequested) -> None:
        self._status = None
        self.report(event)


@dataclass
class _Status:
    """Asks running units for their stacks. Closes when all have answered, or after a time-out."""

    asked: tuple[UnitHandle, ...]
    answer: Callable[[StatusRequested], object]
    _stacks: dict[int, str] = field(default_factory=dict)
    _closed: bool = False

    def ask(self) -> None:
        for running in self.asked:
            running.ask_for_stacks(partial(self._take_answer, running.unit.number))
        self._close_if_complete()

    def _take_answer(self, unit: int, stacks: str) -> None:
        self._stacks[unit] = stacks
        self._close_if_complete()

    def _close_if_complete(self) -> None:
        if len(self._stacks) == len(self.asked):
            self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        tests = []
        for running in self.asked:
            stacks = self._stacks.get(running.unit.number, "")
            tests.append(Running(running.test, running.lease, running.seconds, stacks))
        self.answer(StatusRequested(tuple(tests)))
