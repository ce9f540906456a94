"""Shows the user the tests that run: their output as it arrives, and where each of them is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch_testing_ext._process.loop import EventLoop, Timer

from ..events import Event, Output, Running, StatusRequested
from .running_unit import UnitHandle

STREAM_INTERVAL = 0.05
STACKS_TIMEOUT = 3.0


class LiveView:
    """Reports the output of running units, with -s, and their status, when the user asks for it."""

    def __init__(
        self, running: Mapping[int, UnitHandle], loop: EventLoop, report: Callable[[Event], object], stream: bool
    ):
        self._running = running
        self._loop = loop
        self._report = report
        self._stream = stream
        self._copying: Timer | None = None
        self._status: _Status | None = None

    @contextmanager
    def showing_output(self) -> Iterator[None]:
        self._copy_output()
        yield
        if self._copying is not None:
            self._copying.cancel()

    def _copy_output(self) -> None:
        if self._stream:
            for running in self._running.values():
                self.copy_output_of(running)
            self._copying = self._loop.after(STREAM_INTERVAL, self._copy_output)

    def copy_output_of(self, running: UnitHandle) -> None:
        if self._stream and (text := running.new_output()):
            self._report(Output(running.test.id, text))

    def show_status(self) -> None:
        """Report which tests run, and where they are, unless that is being found out already."""
        if self._status is None:
            self._status = _Status(self._running.values(), self._answer)
            self._loop.after(STACKS_TIMEOUT, self._status.close)
            self._status.ask()

    def _answer(self, event: StatusRequested) -> None:
        self._status = None
        self._report(event)


class _Status:
    """Asks running units for their stacks. Closes when all have answered, or after a time-out."""

    def __init__(self, asked: Iterable[UnitHandle], answer: Callable[[StatusRequested], object]):
        self._asked = tuple(asked)
        self._answer = answer
        self._stacks: dict[int, str] = {}
        self._closed = False

    def ask(self) -> None:
        for running in self._asked:
            running.ask_for_stacks(partial(self._take_answer, running.unit.number))
        self._close_if_complete()

    def _take_answer(self, unit: int, stacks: str) -> None:
        self._stacks[unit] = stacks
        self._close_if_complete()

    def _close_if_complete(self) -> None:
        if len(self._stacks) == len(self._asked):
            self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._answer(StatusRequested(tuple(map(self._describe, self._asked))))

    def _describe(self, running: UnitHandle) -> Running:
        return Running(running.test, running.lease, running.seconds, self._stacks.get(running.unit.number, ""))
