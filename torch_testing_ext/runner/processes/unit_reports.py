"""A worker's reports about the tests and fixtures of its unit."""

import ast
import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os import fstat, listdir
from pathlib import Path
from time import monotonic

from torch_testing_ext import fault_points, faults
from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._collectives.worlds import world_views
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._tests.notes import take_left_running, take_notes
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext._tests.sweep_reports import SweepReport
from torch_testing_ext.launch import Cause, accounts, device_memory
from torch_testing_ext.launch.aspects.faults import SWEEP
from torch_testing_ext.runner.model import DeviceMemory, TestEnd

from .unit_spec import UnitSpec
from .worker_messages import Began, Ended, FailedSoFar, FixtureBegan, FixtureEnded, FixtureFailed, FromWorker, NotRun

# The files of a run have a message of this length whole. Readers of XML refuse texts beyond ten million bytes.
LONGEST_SENT_MESSAGE = 4_000_000
# Whole worlds of one test.
_MOST_WORLDS = 4
# Warnings of one test, and the characters of each.
_MOST_WARNINGS = 20
_LONGEST_WARNING = 200

Send = Callable[[FromWorker], None]


@dataclass
class UnitReports:
    """Reports what begins and ends in the unit that this process runs, with its output so far.

    Nothing here depends on what a test may change in its process: paths, its user, limits, functions of modules.
    """

    unit: UnitSpec
    send: Send
    _ranks_seen: set[str] = field(default_factory=set)
    _port_in_use: bool = False
    # In their order, each once.
    _raised_warnings: dict[str, None] = field(default_factory=dict)
    # The log, open: a test may remove it.
    _log: int = field(init=False)
    _logged: int = 0

    def __post_init__(self) -> None:
        self._log = os.open(self.unit.log, os.O_RDONLY | os.O_CLOEXEC)

    def test_began(self, number: int) -> None:
        device_memory.forget_memory()
        world_views.noted.take()
        self._port_in_use = False
        self._raised_warnings.clear()
        self.send(Began(number, monotonic(), self._length_of_log()))

    def note_warning(self, place: str, category: str, text: str) -> None:
        """Note a warning of the test that is running, by its first line."""
        if len(self._raised_warnings) < _MOST_WARNINGS:
            first = text.strip().partition("\n")[0][:_LONGEST_WARNING]
            self._raised_warnings[f"{place.removeprefix(f'{self.unit.root}/')}: {category}: {first}"] = None

    def note_cause(self, cause: Cause) -> None:
        """Note the cause of a failure of the test or fixture that is running."""
        self._port_in_use |= cause is Cause.PORT_IN_USE

    def test_ended(self, number: int, outcome: TestOutcome, ended: FailureView | str, want: str | None) -> None:
        """`ended`: the failure, or a text. A failure names the command that runs the test alone."""
        notes = take_notes()
        memory = device_memory.highest([*notes.memory, accounts.memory_of_this_process()])
        if outcome.is_failure and isinstance(ended, str) and ended:
            ended = FailureView.of_text(ended)
        message, failure = (ended, None) if isinstance(ended, str) else ("", ended)
        if failure is not None and not failure.rerun_command:
            failure = replace(failure, rerun_command=self.unit.commands[number])
        end = TestEnd(
            outcome,
            cut_middle(message, LONGEST_SENT_MESSAGE),
            failure and failure.cut(LONGEST_SENT_MESSAGE),
            want,
            self._port_in_use,
            memory and DeviceMemory(*memory),
            notes.warnings,
            notes.left_running,
            world_views.noted.take()[:_MOST_WORLDS],
            _sweep_of(notes.sweeps, outcome),
            tuple(self._raised_warnings),
        )
        self.send(Ended(number, monotonic(), end, self._length_of_log(), self._new_rank_directories()))

    def not_run(self, number: int, outcome: TestOutcome, told: FailureView | str, want: str | None = None) -> None:
        message, failure = (told, None) if isinstance(told, str) else ("", told)
        self.send(NotRun(number, monotonic(), TestEnd(outcome, message, failure, want, self._port_in_use)))

    def failed_so_far(self, number: int, outcome: TestOutcome, told: FailureView | str) -> None:
        """The test has failed, whatever its tear-down does to this process."""
        failure = FailureView.of_text(told) if isinstance(told, str) else told
        if not failure.rerun_command:
            failure = replace(failure, rerun_command=self.unit.commands[number])
        self.send(FailedSoFar(number, TestEnd(outcome, failure=failure.cut(LONGEST_SENT_MESSAGE))))

    def shared_fixture_began(self, name: str, needed_by: tuple[int, ...]) -> None:
        """A test sets up a fixture of a class, a module or the session."""
        self.send(FixtureBegan(name, monotonic(), needed_by))

    def shared_fixture_ended(self) -> None:
        self.send(FixtureEnded(()))

    def fixture_began(self, name: str, needed_by: tuple[int, ...] = ()) -> None:
        """`needed_by`: the tests that cannot run without it."""
        self._port_in_use = False
        self.send(FixtureBegan(name, monotonic(), needed_by))

    def fixture_ended(self) -> None:
        self.send(FixtureEnded(take_left_running()))

    def fixture_failed(self, told: FailureView | str) -> None:
        """A tear-down has failed, or anything else after a test."""
        failure = FailureView.of_text(told) if isinstance(told, str) else told
        self.send(FixtureFailed(failure.cut(LONGEST_SENT_MESSAGE)))

    def _length_of_log(self) -> int:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a test may have closed or replaced them: that is no failure
                stream.flush()
        # The test may have closed it.
        with suppress(OSError):
            self._logged = fstat(self._log).st_size
        return self._logged

    def _new_rank_directories(self) -> tuple[str, ...]:
        """The directories with the files of the ranks that were started since the last call."""
        new: list[str] = []
        # The first test that starts ranks makes it; one that has lowered its limits may be unable to read it.
        with suppress(OSError):
            new = sorted(set(listdir(self.unit.ranks)) - self._ranks_seen)
        self._ranks_seen.update(new)
        return tuple(new)


NO_RANKS = "it has no ranks that a fault can end: use MultiProcessTestCase, or @pytest.mark.world_size"


def _sweep_of(noted: Sequence[SweepReport], outcome: TestOutcome) -> SweepReport | None:
    """The report on the faults of a test; in a sweep of the run with the names in the code, or why it has no faults."""
    is_of_run = SWEEP.value() is not None
    for report in noted:
        if report.cells:
            # Where one test is swept, other tests of the file may reach the names.
            return replace(report, names=_names_in_code()) if is_of_run else report
    if not is_of_run or outcome.counts_as is not TestOutcome.PASSED:
        return None
    return noted[0] if noted else SweepReport(why_not=NO_RANKS)


def _names_in_code() -> tuple[str, ...]:
    """The names that imported modules give to `fault_point` and `reached`, which show what no run has reached."""
    names: set[str] = set()
    sought = [fault_points.fault_point, fault_points.reached, fault_points, faults]
    alone = sys.modules.get(_STANDS_ALONE)
    if alone is not None:
        sought += [alone, alone.fault_point, alone.reached]
    for module in list(sys.modules.values()):
        content = dict(getattr(module, "__dict__", {}))
        called = frozenset(name for name, value in content.items() if any(value is each for each in sought))
        file = str(content.get("__file__") or "")
        if file.endswith(".py") and str(content.get("__name__")).partition(".")[0] not in _NOT_OF_USERS:
            names.update(_names_given(file, called))
    return tuple(sorted(names))


_NOT_OF_USERS = frozenset({"torch", __name__.partition(".")[0], *sys.stdlib_module_names} - {"__main__"})
# The module that code may import where the kit is not installed.
_STANDS_ALONE = "torch_testing_ext_points"
_OUR_MODULES = ("torch_testing_ext", _STANDS_ALONE, fault_points.__name__, faults.__name__)
_SOUGHT = ("fault_point", "reached", "fault_points", "faults")


@functools.cache
def _names_given(file: str, called: frozenset[str]) -> frozenset[str]:
    """The names that the code of a file gives to these functions, or to those of these modules.

    `called`: the names that the module has for them. Functions may import them, too.
    """
    try:
        source = Path(file).read_bytes()
        if not called and b"torch_testing_ext" not in source:
            return frozenset()
        nodes = list(ast.walk(ast.parse(source)))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    called |= {name for node in nodes for name in _imported(node)}
    given = set()
    for node in nodes:
        match node:
            case ast.Call(
                ast.Name(name) | ast.Attribute(ast.Name(name), "fault_point" | "reached"),
                [ast.Constant(str() as text), *_],
            ) if name in called:
                given.add(text)
    return frozenset(given)


def _imported(node: ast.AST) -> list[str]:
    """The names by which an import brings these functions or modules."""
    match node:
        case ast.ImportFrom(module, names) if module in _OUR_MODULES:
            return [each.asname or each.name for each in names if each.name in _SOUGHT]
        case ast.Import(names):
            return [each.asname for each in names if each.asname and each.name in _OUR_MODULES]
    return []
