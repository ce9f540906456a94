"""What a run is about: tests, units, attempts and their outcomes. Data only; every other room here speaks in it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class TestOutcome(enum.Enum):
    __test__ = False  # nothing for pytest to collect

    PASSED = "passed"
    FAILED = "failed"  # an assertion, or ranks that disagree
    ERROR = "error"  # an exception; a file that cannot be imported
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # a signal, or an exit before the test was over
    LEAKED = "leaked"  # passed, but left processes running, which were ended
    FLAKY = "flaky"  # failed, then passed when tried again
    SKIPPED = "skipped"
    EXPECTED_FAILURE = "expected failure"
    UNEXPECTED_SUCCESS = "unexpected success"


class Category(enum.Enum):
    """What an outcome counts as in the last line."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


COUNTS_AS = {
    TestOutcome.PASSED: Category.PASSED,
    TestOutcome.FAILED: Category.FAILED,
    TestOutcome.ERROR: Category.FAILED,
    TestOutcome.TIMEOUT: Category.FAILED,
    TestOutcome.CRASHED: Category.FAILED,
    TestOutcome.LEAKED: Category.PASSED,  # unless --leaked fail
    TestOutcome.FLAKY: Category.PASSED,  # unless --flaky fail
    TestOutcome.SKIPPED: Category.SKIPPED,
    TestOutcome.EXPECTED_FAILURE: Category.PASSED,
    TestOutcome.UNEXPECTED_SUCCESS: Category.FAILED,
}


@dataclass(frozen=True, order=True)
class TestId:
    """`test/distributed/test_x.py::Class::test_y`. A file that cannot be imported is the test of no class."""

    file: str  # relative to the root of the run, with forward slashes
    cls: str = ""
    method: str = ""

    def __str__(self) -> str:
        return "::".join(part for part in (self.file, self.cls, self.method) if part)

    @property
    def dotted(self) -> str:
        """`Class.test_y`, as unittest wants it."""
        return f"{self.cls}.{self.method}" if self.cls else ""

    __test__ = False


@dataclass(frozen=True)
class Test:
    """One test and what it needs; all of it read from the imported file, nothing from running it."""

    id: TestId
    world_size: int = 1  # processes that compute at the same time
    devices: int = 0  # accelerators it will use on this machine
    backend: str | None = None
    timeout: float | None = None  # its own, by @timeout
    together: str = ""  # tests of one file with the same name here share class fixtures, hence a process
    skip: str | None = None  # known before it runs
    want: str | None = None  # where it is skipped for want of devices: of what ("4 devices")
    line: int = 0

    __test__ = False


@dataclass(frozen=True)
class Unit:
    """What runs in one process with one lease: a test, or the tests that share class fixtures."""

    number: int
    tests: tuple[Test, ...]
    repetition: int = 0
    attempt: int = 1
    seconds: float | None = None  # how long it is expected to take; None where nothing is known

    @property
    def devices(self) -> int:
        return max(test.devices for test in self.tests)

    @property
    def ranks(self) -> int:
        return max(test.world_size for test in self.tests)

    @property
    def file(self) -> str:
        return self.tests[0].id.file


@dataclass(frozen=True)
class Lease:
    """What a running unit has to itself: devices by the names the inherited mask gives them, and CPU slots."""

    devices: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankLog:
    """What one rank wrote, and where it was when it was asked."""

    rank: int
    output: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class Attempt:
    """One test, run once."""

    test: Test
    outcome: TestOutcome
    message: str = ""  # of a failure: in the form of the launch layer; of a skip: the reason
    seconds: float = 0.0
    began: float = 0.0  # seconds since the run began
    repetition: int = 0
    number: int = 1  # of the attempt
    want: str | None = None  # skipped for want of this
    output: str = ""  # of the test's own process
    ranks: tuple[RankLog, ...] = ()
    leftovers: tuple[str, ...] = ()  # processes that outlived it, and were ended
    lease: Lease = field(default_factory=Lease)


@dataclass(frozen=True)
class FinishedTest:
    """A test that will not be tried again: all its attempts (of one repetition), the last one last."""

    attempts: tuple[Attempt, ...]

    @property
    def test(self) -> Test:
        return self.attempts[-1].test

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    @property
    def outcome(self) -> TestOutcome:
        last = self.last.outcome
        tried_again = len(self.attempts) > 1 and COUNTS_AS[last] is Category.PASSED
        return TestOutcome.FLAKY if tried_again else last

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)


@dataclass(frozen=True)
class Policy:
    """What else shall count as a failure."""

    fail_flaky: bool = False
    fail_leaked: bool = False

    def verdict(self, outcome: TestOutcome) -> Category:
        failing = (outcome is TestOutcome.FLAKY and self.fail_flaky) or (
            outcome is TestOutcome.LEAKED and self.fail_leaked
        )
        return Category.FAILED if failing else COUNTS_AS[outcome]


@dataclass(frozen=True)
class Summary:
    """A run that is over."""

    settled: tuple[FinishedTest, ...]
    seconds: float
    policy: Policy = Policy()
    interrupted: bool = False
    unfinished: tuple[Test, ...] = ()  # begun or waiting when the run was interrupted or stopped by --max-fail
    warnings: tuple[str, ...] = ()

    def count(self, verdict: Category) -> int:
        return sum(self.policy.verdict(one.outcome) is verdict for one in self.settled)

    @property
    def failures(self) -> tuple[FinishedTest, ...]:
        return tuple(one for one in self.settled if self.policy.verdict(one.outcome) is Category.FAILED)

    @property
    def last_line(self) -> str:
        passed, failed, skipped = (self.count(verdict) for verdict in Category)
        return f"{passed} passed, {failed} failed, {skipped} skipped"


class ExitCode(enum.IntEnum):
    PASSED = 0
    FAILED = 1
    INTERRUPTED = 2
    OUR_ERROR = 3
    USAGE = 4
    NOTHING_SELECTED = 5
    ALL_SKIPPED = 6  # everything selected was skipped for want of devices


def exit_code(summary: Summary, allow_all_skipped: bool = False) -> ExitCode:
    if summary.interrupted:
        return ExitCode.INTERRUPTED
    if summary.failures:
        return ExitCode.FAILED
    if not summary.settled:
        return ExitCode.NOTHING_SELECTED
    return ExitCode.ALL_SKIPPED if _all_for_want(summary.settled) and not allow_all_skipped else ExitCode.PASSED


def _all_for_want(settled: Sequence[FinishedTest]) -> bool:
    return all(one.outcome is TestOutcome.SKIPPED and one.last.want for one in settled)
