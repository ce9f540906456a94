"""The question which tests are running, and where each of them is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..events import Running, StatusRequested
from .running_unit import UnitHandle


class Question:
    """Asks running units where they are. Closes when all have answered, or when the patience is over."""

    def __init__(self, asked: Sequence[UnitHandle], answer: Callable[[StatusRequested], object]):
        self._asked = asked
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
