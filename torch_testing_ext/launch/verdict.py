"""The verdict on a test: an outcome, a message and a culprit; and what a test expects of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch.accounts import RankEnding
from torch_testing_ext.launch.causes import Cause
from torch_testing_ext.launch.rank_reports import RankReport, all_passed

if TYPE_CHECKING:
    from torch_testing_ext.faults import FaultPlan


@dataclass(frozen=True)
class Expected:
    """The declarations of a test: exit codes, and whether its ranks may issue different collectives.

    `code`: the exit code that rank 0 must have.
    """

    any_code: bool = False
    code: int | None = None
    may_differ: bool = False
    faults: FaultPlan | None = None

    def decides(self, report: RankReport) -> bool:
        """Whether this rank's ending alone makes the test fail."""
        if report.ending in (RankEnding.FAILED, RankEnding.ERROR, RankEnding.LOST, RankEnding.STOPPED):
            return True
        return report.ending.is_failure and not self.codes_are_open

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may issue other calls than their peers: the test says so, or a rank goes on without a peer."""
        return self.may_differ or self.faults is not None

    @property
    def codes_are_open(self) -> bool:
        return self.any_code or self.code is not None


@dataclass(frozen=True)
class Case:
    """The test that is judged. `rerun_command`: it runs the test alone; `file`: its source file.

    `show_command`: it shows the whole account. Without one the failure's text is the account.
    """

    name: str
    rerun_command: str = ""
    file: str = ""
    note: str = ""  # what else must be known to run it again
    show_command: str = ""
    kept_as: str = ""  # the name under which the account is to be kept for that command
    is_script: bool = False  # its ranks run this file, which has the name of the case

    @property
    def function(self) -> str:
        return self.name.partition("[")[0].replace("::", ".").rpartition(".")[2]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a test, and the rank that caused it."""

    outcome: TestOutcome
    text: str = ""  # why it was skipped; what is to be said although it passed; a failure that is only a text
    culprit: int | None = None
    code: int | None = None  # the exit code of all ranks, if they skipped
    cause: Cause = Cause.OWN  # of a failure; peers are among the ranks, so it is never theirs
    failure: FailureView | None = None
    kept_as: str = ""  # the name under which the account is to be kept in a file

    @property
    def message(self) -> str:
        """The text for the user. Of a failure: one screen, or its account if no command would show that."""
        if self.failure is None:
            return self.text
        return self.failure.screen if self.failure.show_command else self.failure.account_with_notes

    @property
    def account(self) -> str:
        """All that is known of a failure."""
        return self.failure.account if self.failure is not None else ""

    def with_note(self, note: str) -> Verdict:
        """The verdict, with a note on something else."""
        if self.failure is not None:
            return replace(self, failure=self.failure.with_note(note))
        return replace(self, text=f"{self.text}\n\n{note}")


def nothing_to_judge(reports: Sequence[RankReport], expected: Expected) -> bool:
    """Whether all ranks have passed, as expected, with equal collectives and no finding of the sanitizer."""
    left = any(r.recorder or r.issued or r.found for r in reports) or expected.faults is not None
    return all_passed(reports) and not left and not expected.codes_are_open
