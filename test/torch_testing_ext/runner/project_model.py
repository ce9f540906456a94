"""The model of the fixture project: the expected result of each test, the same for every report."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from torch_testing_ext._tests.outcomes import VERDICTS, TestOutcome

PROJECT = Path(__file__).parent / "project"
BROKEN_SYNTAX = "def never(:\n    pass\n"  # written when the project is copied, so that no tool finds it here
RETRIES = 2


@dataclass(frozen=True)
class Must:
    """The expected result of one test."""

    outcome: TestOutcome
    say: str = ""  # part of its message; of a flaky test, part of the first attempt's message
    attempts: tuple[TestOutcome, ...] = ()
    ranks: tuple[str, ...] = ()  # part of each rank's output
    output: str = ""  # part of the output of the test's process
    leaves: bool = False  # whether it leaves processes running
    want: str | None = None

    @property
    def verdict(self) -> TestOutcome:
        return self.outcome.counts_as

    @property
    def all_attempts(self) -> tuple[TestOutcome, ...]:
        """The outcome of each attempt: a test that fails is retried RETRIES times."""
        retries = RETRIES if self.verdict is TestOutcome.FAILED and self.attempts == () else 0
        return self.attempts or (self.outcome,) * (1 + retries)


PASSED = Must(TestOutcome.PASSED)
# Before pytest 9, a test ends at its first subtest that fails.
LAST_SUBTEST = "number=3" if pytest.version_tuple >= (9,) else "1 unexpectedly found"
ONCE = (TestOutcome.ERROR,)  # what cannot be imported or run is not tried again
MODEL = {
    "test_simple.py": {
        "SimpleTest::test_passes": PASSED,
        "SimpleTest::test_fails": Must(TestOutcome.FAILED, "'left' != 'right'", output="what it printed before"),
        "SimpleTest::test_raises": Must(TestOutcome.ERROR, "LookupError: nothing is <there> & \\x00 never was"),
        "SimpleTest::test_skipped_by_decorator": Must(TestOutcome.SKIPPED, "skipped before it runs"),
        "SimpleTest::test_skips_itself": Must(TestOutcome.SKIPPED, "skipped while it runs"),
        "SimpleTest::test_expected_failure": Must(TestOutcome.EXPECTED_FAILURE),
        "SimpleTest::test_unexpected_success": Must(TestOutcome.UNEXPECTED_SUCCESS, "expected to fail"),
        "SimpleTest::test_subtests": Must(TestOutcome.FAILED, LAST_SUBTEST),
        "SimpleTest::test_good_subtests": PASSED,
        "SimpleTest::test_exits_by_sys_exit": Must(TestOutcome.ERROR, "SystemExit"),
        "SimpleTest::test_prints_20_megabytes": Must(TestOutcome.PASSED, output="the last line of it"),
        "SimpleTest::test_changes_what_others_have": PASSED,
        "SimpleTest::test_has_what_it_should": PASSED,
        "ParametrizedTest::test_sizes_size_1_kind_even": Must(TestOutcome.FAILED, "False != True"),
        "ParametrizedTest::test_sizes_size_1_kind_odd": PASSED,
        "ParametrizedTest::test_sizes_size_2_kind_even": PASSED,
        "ParametrizedTest::test_sizes_size_2_kind_odd": Must(TestOutcome.FAILED, "True != False"),
    },
    "test_crashing.py": {
        "CrashingTest::test_is_killed": Must(TestOutcome.CRASHED, "SIGKILL"),
        "CrashingTest::test_segfaults": Must(TestOutcome.CRASHED, "SIGSEGV"),
        "CrashingTest::test_exits_early": Must(TestOutcome.CRASHED, "exited with code 0"),
        "CrashingTest::test_leaks_a_process": Must(TestOutcome.LEAKED, leaves=True),
        "CrashingTest::test_leaks_a_thread": PASSED,
        "CrashingTest::test_hangs": Must(TestOutcome.TIMEOUT, "test_hangs"),
        "CrashingTest::test_ignores_sigterm": Must(TestOutcome.TIMEOUT, "test_ignores_sigterm"),
        "CrashingTest::test_of_the_neighbours": PASSED,
    },
    "test_ranks.py": {
        "RanksTest::test_passes": Must(TestOutcome.PASSED, ranks=("rank 0 has reduced", "rank 1 has reduced")),
        "RanksTest::test_fails_in_one_rank": Must(
            TestOutcome.FAILED, "rank 1 of 2 failed", ranks=("rank 0 is about to compare", "rank 1 is about to compare")
        ),
        "RanksTest::test_fails_in_all_ranks": Must(TestOutcome.ERROR, "no such layer in rank 1"),
        "RanksTest::test_skips": Must(TestOutcome.SKIPPED, "no rank wants to"),
        "RanksTest::test_skips_in_one_rank": Must(TestOutcome.FAILED, "skipped"),
        "RanksTest::test_crashes_in_one_rank": Must(TestOutcome.CRASHED, "rank 1 of 2 was killed by SIGSEGV"),
        "RanksTest::test_exits_in_one_rank": Must(TestOutcome.CRASHED, "rank 1 of 2 exited with code 0"),
        "RanksTest::test_hangs_in_one_rank": Must(TestOutcome.TIMEOUT, "rank 1: still running"),
        "RanksTest::test_wants_devices": Must(TestOutcome.SKIPPED, "4096 devices", want="4096 devices"),
    },
    "test_flaky.py": {
        "FlakyTest::test_passes_on_the_third_attempt": Must(
            TestOutcome.FLAKY, "attempt 1 is too early", (TestOutcome.FAILED, TestOutcome.FAILED, TestOutcome.PASSED)
        ),
    },
    "test_fixtures.py": {
        "SharedTest::test_first": PASSED,
        "SharedTest::test_second": PASSED,
        "DyingTest::test_a_passes": PASSED,
        "DyingTest::test_b_exits": Must(TestOutcome.CRASHED, "exited with code 7"),
        "DyingTest::test_c_passes": PASSED,
        "BrokenFixtureTest::test_needs_it": Must(TestOutcome.ERROR, "the fixture is not there"),
        "SkippedFixtureTest::test_needs_it": Must(TestOutcome.SKIPPED, "the fixture does not want to"),
    },
    "test_same_names.py": {
        "One::test_size": PASSED,
        "Two::test_size": Must(TestOutcome.FAILED, "2 == 2"),
    },
    "test_for_pytest.py": {
        "test_function": PASSED,
        "TestPlain::test_method": Must(TestOutcome.FAILED, "assert 1 == 2"),
        "CaseTest::test_passes": PASSED,
    },
    "test_skips_itself.py": {"": Must(TestOutcome.SKIPPED, "this file does not want to")},
    "test_import_error.py": {"": Must(TestOutcome.ERROR, "there_is_no_such_module", ONCE)},
    "test_exits_at_import.py": {"": Must(TestOutcome.ERROR, "exit", ONCE)},
    "test_syntax_error.py": {"": Must(TestOutcome.ERROR, "SyntaxError", ONCE)},
}

# The tests of a file that unittest's loader runs: pytest does not call `load_tests`.
BY_UNITTEST = {
    "test_same_names.py": {
        **MODEL["test_same_names.py"],
        "One::test_size#2": PASSED,
        "DocTestCase::test_same_names.bad_example": Must(TestOutcome.FAILED, "Failed doctest test"),
    }
}


def copy_to(folder: Path) -> None:
    """Copies the project, so that runs write nothing into this repository."""
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "test_syntax_error.py").write_text(BROKEN_SYNTAX)


def expected(prefix: str, model: Mapping[str, Mapping[str, Must]] = MODEL) -> dict[str, Must]:
    """The expected results by full name of test, for a copy of the project at `prefix`."""
    return {
        f"{prefix}{file}" + (f"::{name}" if name else ""): must
        for file, tests in model.items()
        for name, must in tests.items()
    }


def last_line(model: dict[str, Must]) -> str:
    counts = Counter(must.verdict for must in model.values())
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in VERDICTS)
