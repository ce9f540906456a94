"""The exit code of a run, as a table."""

import io
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from unittest import mock

from kit.invented_runs import a_test, finished_test

from torch_testing_ext._process import system
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner import cli
from torch_testing_ext.runner.model import ExitCode, Summary, exit_code

PASSED = finished_test("test_a", TestOutcome.PASSED)
FAILED = finished_test("test_b", TestOutcome.FAILED)
LACKING = finished_test("test_c", TestOutcome.SKIPPED, want="4 devices")


class ExitCodeTest(TestCase):
    def test_of(self):
        unfinished = (a_test("test_d"),)
        for summary, expected in (
            (Summary((PASSED,), 1.0), ExitCode.PASSED),
            (Summary((PASSED, FAILED), 1.0), ExitCode.FAILED),
            # Also without a failure: nobody knows how it would have ended.
            (Summary((PASSED,), 1.0, unfinished=unfinished), ExitCode.FAILED),
            (Summary((), 1.0, unfinished=unfinished), ExitCode.FAILED),
            (Summary((PASSED,), 1.0, unfinished=unfinished, interrupted=True), ExitCode.INTERRUPTED),
            (Summary((), 1.0), ExitCode.NOTHING_SELECTED),
            (Summary((LACKING,), 1.0), ExitCode.ALL_SKIPPED),
            (Summary((LACKING, PASSED), 1.0), ExitCode.PASSED),
        ):
            with self.subTest(summary=summary):
                self.assertIs(exit_code(summary), expected)

    def test_of_a_system_that_cannot_fork(self):
        said = io.StringIO()
        with mock.patch.object(system, "CAN_FORK", False), redirect_stderr(said), tempfile.TemporaryDirectory() as root:
            self.assertEqual(cli.main(["test_x.py"], Path(root)), ExitCode.OUR_ERROR)
        self.assertRegex(said.getvalue(), r": torchtest forks .* needs Linux: run tests by pytest\n$")


if __name__ == "__main__":
    run_tests()
