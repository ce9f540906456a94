"""Programs of ranks with one slip each, and what the first screen must say of them; and sound programs beside them.

A comment behind a line of a program names the ranks whose row on the screen must have that line: `# rank 1`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch_testing_ext._collectives.failure import WHOLE_ACCOUNT
from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext.common_distributed import sanitize
from torch_testing_ext.launch.watching import run_watcher
from torch_testing_ext.launch.watching.rules import RankWatch, Step

from .early_looks import early_looks
from .outcomes import outcome_of
from .ranks import Ranks, wait_for

LEVELS = {1: (), 2: ("default",)}
# Seconds that the last calls of ranks get, which do not end.
_OF_LAST_CALLS = 2.0
_OF_RANKS = re.compile(r"# (ranks? [\d, -]+\d)$")


def _as_it_is(test: Any) -> Any:
    return test


@dataclass(frozen=True)
class Program:
    """A program of all ranks. `told`: texts of the title, in order; () of a sound one. `seconds`: its time-out.

    `shown`: texts of its rows. `is_whole`: nothing is cut in them, and each is on one line. `faults`: a decorator.
    `needs_timeout`: nothing is proven before. Its ranks say when they `begin_last_call`: then its time is soon over.
    """

    body: Callable[[Any], None]
    size: int
    levels: tuple[int, ...]
    told: tuple[str, ...] = ()
    seconds: float = 1000.0
    # The ranks have a group before it begins.
    joins: bool = True
    shown: tuple[str, ...] = ()
    is_whole: bool = False
    faults: Callable[[Any], Any] = _as_it_is
    needs_timeout: bool = False

    @property
    def name(self) -> str:
        return self.body.__name__

    @property
    def rows(self) -> Iterator[tuple[str, str]]:
        """The ranks of each row that the screen must have, and its line."""
        lines, first = inspect.getsourcelines(self.body)
        file = os.path.basename(inspect.getsourcefile(self.body) or "")
        for number, line in enumerate(lines, first):
            named = _OF_RANKS.search(line.rstrip())
            if named:
                yield named[1], f"{file}:{number}"


class Programs:
    """The programs of a module, each with a class for each level, by which a rank finds it."""

    def __init__(self, module: str):
        self._module = sys.modules[module]
        self.planted: list[Program] = []
        self.sound: list[Program] = []

    def told(
        self,
        *texts: str,
        size: int = 3,
        levels: tuple[int, ...] = (1, 2),
        seconds: float = 250.0,
        joins: bool = True,
        shown: tuple[str, ...] = (),
        is_whole: bool = False,
        faults: Callable[[Any], Any] = _as_it_is,
        needs_timeout: bool = False,
    ) -> Callable[[Any], Any]:
        """A program with a slip. `texts`: parts of the title."""

        def plant(body: Any) -> Any:
            program = Program(body, size, levels, texts, seconds, joins, shown, is_whole, faults, needs_timeout)
            self._add(self.planted, program)
            return body

        return plant

    def quiet(
        self,
        size: int = 3,
        levels: tuple[int, ...] = (1, 2),
        joins: bool = True,
        faults: Callable[[Any], Any] = _as_it_is,
    ) -> Callable[[Any], Any]:
        """A program without a slip."""

        def plant(body: Any) -> Any:
            self._add(self.sound, Program(body, size, levels, seconds=120.0, joins=joins, faults=faults))
            return body

        return plant

    def _add(self, programs: list[Program], program: Program) -> None:
        programs.append(program)
        for level in program.levels:
            name = _class_of(program, level)
            own = {"world_size": program.size, "runs": _run(program, level), "__module__": self._module.__name__}
            setattr(self._module, name, type(name, (Ranks,), own))

    def case(self, program: Program, level: int) -> Any:
        return getattr(self._module, _class_of(program, level))("runs")


def _class_of(program: Program, level: int) -> str:
    return f"Level{level}_{program.name}"


def _run(program: Program, level: int) -> Any:
    def runs(self: Any) -> None:
        if program.joins:
            self.join_group()
            _meet(self)
        program.body(self)

    with_faults = program.faults(runs)
    return sanitize(*LEVELS[level])(with_faults) if level > 1 else with_faults


def _meet(test: Any) -> None:
    """Wait until all ranks have joined the group: one that still does when another aborts has not called anything."""
    files = _files_of_ranks(test, "joined")
    files[test.rank].touch()
    wait_for(lambda: all(file.exists() for file in files))


def begin_last_call(test: Any) -> None:
    """In a rank: what comes next does not end."""
    _files_of_ranks(test, "last")[test.rank].touch()


def _files_of_ranks(test: Any, name: str) -> list[Path]:
    return [Path(f"{test.file_name}.{name}{rank}") for rank in range(test.world_size)]


def _time_is_over_in_last_calls(case: Any) -> Any:
    """Let the time of the test be over when all ranks have begun their last calls for a while."""

    class Watch(RankWatch):
        """Asks again and again whether they have."""

        has_limit = False

        def step(self, now: float) -> Step:
            if not self.has_limit and all(file.exists() for file in _files_of_ranks(case, "last")):
                self.has_limit = True
                self.limit(now + _OF_LAST_CALLS)
            step = super().step(now)
            return step if step.until is None else replace(step, until=min(step.until, now + 0.1))

    return mock.patch.object(run_watcher, "RankWatch", Watch)


def check_told(test: Any, programs: Programs, program: Program, level: int) -> None:
    """The screen has the title and the rows, and no time-out was needed, or only as the program says."""
    case = programs.case(program, level)
    time_is_over = _time_is_over_in_last_calls(case) if program.needs_timeout else contextlib.nullcontext()
    with mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", program.seconds), early_looks(), time_is_over:
        seen = outcome_of(case)
    test.assertIn(seen.outcome, ("failed", "error"), program.name)
    test.assertEqual("timed out after" in seen.message, program.needs_timeout, seen.message)
    beginning = seen.message.partition("common_distributed.Rank")[2]
    screen = beginning.partition(WHOLE_ACCOUNT)[0]
    title, _, rest = screen.partition("\n")
    at = 0
    for text in program.told:
        found = title.find(text, at)
        test.assertGreaterEqual(found, 0, f"{text!r} is not, or not in this order, in:\n{screen}")
        at = found + len(text)
    for ranks, place in program.rows:
        row = re.compile(rf"^  {re.escape(ranks)}  .*?(\n +)?{re.escape(place)}\b", re.MULTILINE)
        test.assertRegex(rest, row, screen)
    table = rest.partition("\n\n")[0]
    for text in program.shown:
        test.assertIn(text, table)
    if program.is_whole:
        test.assertNotIn("...", table)
        test.assertNotRegex(table, r"(?m)^ {8}", "a line of its own for a place")
    too_wide = [line for line in rest.splitlines() if len(line) > 80 and "|" in line]
    test.assertEqual(too_wide, [], screen)


def check_quiet(test: Any, programs: Programs, program: Program, level: int) -> None:
    """The program passes, and not a word is said."""
    said = io.StringIO()
    with (
        mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", program.seconds),
        early_looks(),
        contextlib.redirect_stderr(said),
    ):
        seen = outcome_of(programs.case(program, level))
    test.assertEqual(seen, ("passed", ""))
    test.assertEqual(said.getvalue(), "")


def add_tests(cls: Any, programs: Programs, *marks: Callable[[Any], Any]) -> None:
    """Give the class a test for each program at each level. `marks`: for each level, if there are any."""
    for kind, check in (("planted", check_told), ("sound", check_quiet)):
        for program in getattr(programs, kind):
            for level in program.levels:
                name = f"test_{program.name}_at_level_{level}"
                assert not hasattr(cls, name), name
                mark = marks[level - 1] if marks else _as_it_is
                setattr(cls, name, mark(_test(check, programs, program, level)))


def _test(check: Callable[..., None], programs: Programs, program: Program, level: int) -> Callable[[Any], None]:
    # A mark of pytest decorates functions, but no lambda.
    def test(self: Any) -> None:
        check(self, programs, program, level)

    return test
