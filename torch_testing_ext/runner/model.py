"""The data of a run: tests, units, leases, attempts and their results."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._collectives.lanes_of_ranks import RankLane
from torch_testing_ext._collectives.worlds.world_views import WorldView
from torch_testing_ext._machine.device_needs import NO_NEEDS, DeviceNeeds
from torch_testing_ext._tests.notes import KitWarning
from torch_testing_ext._tests.outcomes import VERDICTS, TestOutcome
from torch_testing_ext._tests.sweep_reports import SweepReport


@dataclass(frozen=True, order=True)
class TestId:
    """The name of a test: `test/distributed/test_x.py::Class::test_y`. A whole file has no class and no method."""

    file: str  # relative to the root of the run, with forward slashes
    cls: str = ""
    method: str = ""

    def __str__(self) -> str:
        return "::".join(part for part in (self.file, self.cls, self.method) if part)

    @property
    def dotted(self) -> str:
        """`Class.test_y`, the form that unittest uses."""
        return ".".join(part for part in (self.cls, self.method) if part)

    __test__ = False


@dataclass(frozen=True)
class Test:
    """One test and what it needs, as far as the imported file says without running the test."""

    id: TestId
    world_size: int = 1  # number of ranks that compute at the same time
    in_one_process: bool = False  # they are threads, which wait for each other, or simulated
    devices: int = 0  # number of accelerators it uses on this machine
    of_devices: DeviceNeeds = NO_NEEDS  # what it needs of each of them
    shared_by: int = 0  # the ranks that share its devices, as there are too few; 0 if each has its own
    backend: str | None = None
    timeout: float | None = None  # set by @timeout
    has_ranks: bool = False  # its launch layer ends them at the time-out, and explains that
    is_whole_world: bool = False  # it runs a whole world by itself
    together: str = ""  # tests of one file with the same value share fixtures, hence a process
    skip: str | None = None  # reason to skip it, if known before it runs
    want: str | None = None  # if there are not enough devices for it: what it needs ("4 devices")
    line: int = 0
    marks: tuple[str, ...] | None = ()  # the names of its marks of pytest; None if they are not known

    __test__ = False


@dataclass(frozen=True)
class OmittedTest:
    """A test, or a file that stands for its tests, that the options leave out of a run."""

    test: TestId
    why: str  # the option and its value: "-k 'not slow'"
    line: int = 0
    marks: tuple[str, ...] | None = ()


@dataclass(frozen=True)
class Unit:
    """The tests that run in one process with one lease: a single test, or all tests that share fixtures."""

    number: int
    tests: tuple[Test, ...]
    repetition: int = 0
    attempt: int = 1
    seconds: float | None = None  # expected duration; None if unknown
    alone: bool = False  # runs while no other unit does

    @property
    def devices(self) -> int:
        return max(test.devices for test in self.tests)

    @property
    def of_devices(self) -> DeviceNeeds:
        return DeviceNeeds.of_all(test.of_devices for test in self.tests)

    @property
    def shared_by(self) -> int:
        return max(test.shared_by for test in self.tests)

    @property
    def processes(self) -> int:
        """The number of processes that compute at the same time."""
        return max(1 if test.in_one_process else test.world_size for test in self.tests)

    @property
    def file(self) -> str:
        return self.tests[0].id.file


@dataclass(frozen=True)
class Lease:
    """Devices and CPU slots reserved for a running unit. Devices have the names that the inherited mask gives them."""

    devices: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    alone: bool = False
    node: str = ""  # a node of a cluster; empty on this machine
    shared_by: int = 0  # ranks that share the devices; 0 if each has its own
    over: str = ""  # the backend of ranks that share devices


@dataclass(frozen=True)
class Span:
    """The time in which a unit holds its lease."""

    unit: Unit
    lease: Lease
    began: float
    ended: float


@dataclass(frozen=True)
class RankLog:
    """The output of one rank, and its stacks if they were dumped."""

    rank: int
    output: str = ""
    stacks: str = ""
    lane: RankLane | None = None  # ranks of tests that failed have one; with --perfetto every rank


@dataclass(frozen=True)
class DeviceMemory:
    """The most device memory that a test has had, on the device where that was most: all of its processes together."""

    allocated: int  # bytes in tensors
    reserved: int  # bytes that torch's allocators held
    processes: int = 1  # the processes on that device


@dataclass(frozen=True)
class TestEnd:
    """The end of a test, or the reason why it did not run."""

    __test__ = False  # not a test for pytest to collect

    outcome: TestOutcome
    message: str = ""  # why it was skipped, or what else there is to say; a failure of which only this text is known
    failure: FailureView | None = None
    want: str | None = None  # skipped because there are not enough devices: what it needs
    port_in_use: bool = False  # an exception that has led to the failure says so
    memory: DeviceMemory | None = None  # None if it has used no device, or did not say
    warnings: tuple[KitWarning, ...] = ()  # about its ranks
    leftovers: tuple[str, ...] = ()  # processes that outlived the test and were terminated
    worlds: tuple[WorldView, ...] = ()  # the whole worlds that it has run in, or has checked itself
    sweep: SweepReport | None = None  # what its faults did
    raised_warnings: tuple[str, ...] = ()  # Python's, each once

    @property
    def results(self) -> tuple[WorldView | SweepReport, ...]:
        """Its whole worlds and its sweep: each class has a section in `report/sections.py`."""
        return self.worlds if self.sweep is None else (*self.worlds, self.sweep)

    @property
    def said(self) -> str:
        """All that is known, as one text."""
        return self.message if self.failure is None else self.failure.whole

    @property
    def title(self) -> str:
        """The first line of that."""
        return self.message.strip().partition("\n")[0] if self.failure is None else self.failure.headline


@dataclass(frozen=True)
class Attempt:
    """The result of running one test once."""

    test: Test
    end: TestEnd
    seconds: float = 0.0
    began: float = 0.0  # seconds since the start of the run
    repetition: int = 0
    number: int = 1  # 1 is the first attempt
    output: str = ""  # what the test's process printed, without its ranks
    ranks: tuple[RankLog, ...] = ()
    lease: Lease = field(default_factory=Lease)
    evicted: bool = False  # ended because its node was short of memory, of which other tests had some
    reason: str = ""  # the first line of the failure for a line that names the test, if that is another one

    @property
    def outcome(self) -> TestOutcome:
        return self.end.outcome

    @property
    def message(self) -> str:
        return self.end.message

    @property
    def failure(self) -> FailureView | None:
        return self.end.failure

    @property
    def said(self) -> str:
        return self.end.said

    @property
    def title(self) -> str:
        return self.end.title


@dataclass(frozen=True)
class FinishedTest:
    """A test that will not be retried, with all attempts of one repetition in order."""

    attempts: tuple[Attempt, ...]

    @property
    def test(self) -> Test:
        return self.attempts[-1].test

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    @property
    def outcome(self) -> TestOutcome:
        """The outcome of the last attempt, or FLAKY if it passed on a retry.

        A retry that is skipped, or that leaks again, does not undo the failure that it was started for; but that of a
        test whose port another one used is not the user's.
        """
        *earlier, last = (attempt.outcome for attempt in self.attempts)
        if last is TestOutcome.SKIPPED and not all(attempt.end.port_in_use for attempt in self.attempts[:-1]):
            return earlier[-1]
        if last is TestOutcome.LEAKED and set(earlier) <= {last}:
            return last
        return TestOutcome.FLAKY if earlier and last.counts_as is TestOutcome.PASSED else last

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)


@dataclass(frozen=True)
class Policy:
    """The outcomes that count as failures in addition to the usual ones."""

    fail_flaky: bool = False
    fail_leaked: bool = False

    def verdict(self, outcome: TestOutcome) -> TestOutcome:
        """The outcome that counts in the last line: one of VERDICTS."""
        failing = {TestOutcome.FLAKY: self.fail_flaky, TestOutcome.LEAKED: self.fail_leaked}.get(outcome)
        return TestOutcome.FAILED if failing else outcome.counts_as

    def verdict_on(self, finished: FinishedTest) -> TestOutcome:
        """The verdict on a test. The last attempt of a flaky test may be a failure of its own, by leaking."""
        verdicts = {self.verdict(finished.outcome), self.verdict(finished.last.outcome)}
        return TestOutcome.FAILED if TestOutcome.FAILED in verdicts else self.verdict(finished.outcome)


@dataclass(frozen=True)
class NodeOfRun:
    """A node of a cluster that a run began with."""

    name: str
    devices: tuple[str, ...]
    slots: int
    most_at_once: int = 0  # the most devices that one process can use there


@dataclass(frozen=True)
class RunHeader:
    """The place and the software of a run. A fact that could not be found out is empty."""

    command: str = ""  # the command as it was typed
    commit: str = ""  # the commit of the tested project
    uncommitted_changes: bool = False
    host: str = ""
    torch: str = ""
    python: str = ""
    devices: str = ""  # the accelerators, in words
    facts: Mapping[str, str] = field(default_factory=dict)  # what the options mean for all tests, by name


@dataclass(frozen=True)
class Summary:
    """The results of a whole run."""

    finished: tuple[FinishedTest, ...]
    seconds: float
    policy: Policy = Policy()
    interrupted: bool = False
    unfinished: tuple[Test, ...] = ()  # running or waiting when the run was interrupted or stopped by --maxfail
    warnings: tuple[str, ...] = ()
    error: str = ""  # an error of the runner itself, which ended the run early

    @cached_property
    def _verdicts(self) -> tuple[TestOutcome, ...]:
        return tuple(map(self.policy.verdict_on, self.finished))

    def count(self, verdict: TestOutcome) -> int:
        return self._verdicts.count(verdict)

    @property
    def failures(self) -> tuple[FinishedTest, ...]:
        verdicts = zip(self.finished, self._verdicts, strict=True)
        return tuple(test for test, verdict in verdicts if verdict is TestOutcome.FAILED)

    @property
    def last_line(self) -> str:
        """The last line of the console report, which programs may parse."""
        passed, failed, skipped = map(self.count, VERDICTS)
        return f"{passed} passed, {failed} failed, {skipped} skipped"


class ExitCode(enum.IntEnum):
    """The exit codes of the runner."""

    PASSED = 0
    FAILED = 1
    INTERRUPTED = 2
    OUR_ERROR = 3  # an error of the runner itself
    USAGE = 4
    NOTHING_SELECTED = 5
    ALL_SKIPPED = 6  # everything selected was skipped: not enough devices


def exit_code(summary: Summary, allow_all_skipped: bool = False) -> ExitCode:
    if summary.error:
        return ExitCode.OUR_ERROR
    if summary.interrupted:
        return ExitCode.INTERRUPTED
    if summary.failures or summary.unfinished:
        return ExitCode.FAILED
    if not summary.finished:
        return ExitCode.NOTHING_SELECTED
    all_lack_devices = all(test.outcome is TestOutcome.SKIPPED and test.last.end.want for test in summary.finished)
    return ExitCode.ALL_SKIPPED if all_lack_devices and not allow_all_skipped else ExitCode.PASSED
