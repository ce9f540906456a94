"""Reports of ranks with every ending, as data, for the tests of the verdict."""

import signal
import unittest
from dataclasses import fields, replace

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch import (
    Case,
    Cause,
    Exit,
    Expected,
    RaisedError,
    RankAccount,
    RankEnding,
    RankReport,
    Verdict,
)
from torch_testing_ext.launch.judging import judge

CASE = Case("TestThing.test_x", "python test_thing.py TestThing.test_x", "/home/me/test_thing.py")

VICTIM_ERROR = "RuntimeError: [../gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:12345"


# -- reports of ranks, with facts of the records that they are made of

_OF_ERROR = {field.name for field in fields(RaisedError)}
_OF_ACCOUNT = {field.name for field in fields(RankAccount)} - {"ending", "started", "ended", "code", "error"}
_OF_EXIT = {"code", "leftovers"}


def report_on(rank, ending, seconds=0.0, **facts):
    """The report of a rank with facts of its account, its exception and its exit, by their names there."""
    return but(RankReport(rank, ending, seconds), **facts)


def but(report, **facts):
    """A report with other facts, in whichever of its records they are."""
    of_error, of_account, of_exit = (
        {name: facts.pop(name) for name in names & facts.keys()} for names in (_OF_ERROR, _OF_ACCOUNT, _OF_EXIT)
    )
    if of_error or of_account:
        account = report.account or RankAccount(report.ending, 0.0, report.ended)
        facts["account"] = replace(account, error=replace(account.error, **of_error), **of_account)
    if of_exit:
        code = of_exit.get("code", report.code) or 0
        status = -code if code < 0 else code << 8
        facts["exit"] = Exit(status, report.ended, of_exit.get("leftovers", report.leftovers))
    return replace(report, **facts)


# -- ranks, each with one ending. `world` numbers them and has them all start at 0 on the common clock.


def passed(seconds=1.0):
    return report_on(-1, RankEnding.PASSED, seconds, code=0)


def skipped(reason="no luck", code=86):
    return report_on(-1, RankEnding.SKIPPED, 0.1, code=code, summary=reason)


def failed(summary="AssertionError: 1 != 2", seconds=1.0):
    return _failed(RankEnding.FAILED, summary, seconds)


def raised(summary="ValueError: broken", seconds=1.0):
    return _failed(RankEnding.ERROR, summary, seconds)


def _failed(ending, summary, seconds):
    type_name, _, details = summary.partition(": ")
    return report_on(
        -1,
        ending,
        seconds,
        code=10,
        summary=summary,
        traceback=f"Traceback:\n{summary}\n",
        type_name=type_name,
        details=details,
    )


def victim(seconds=1.02):
    return but(raised(VICTIM_ERROR, seconds), cause=Cause.LOST_PEER)


def exited(code, seconds=1.0):
    return report_on(-1, RankEnding.EXITED, seconds, code=code)


def killed(by, seconds=1.0):
    return report_on(-1, RankEnding.KILLED, seconds, code=-by)


def stopped(seconds=1.5, **texts):
    return report_on(-1, RankEnding.STOPPED, seconds, code=-signal.SIGTERM, **texts)


def lost(reason="the process that starts the ranks (pid 7) was killed by signal 9"):
    return report_on(-1, RankEnding.LOST, 1.0, lost=reason)


def world(*reports):
    return [replace(report, rank=rank, ended=report.ended or report.seconds) for rank, report in enumerate(reports)]


ONE_OF_EACH = [
    passed(),
    skipped(),
    failed(),
    raised(),
    exited(0),
    exited(3),
    killed(signal.SIGKILL),
    killed(signal.SIGABRT),
    stopped(),
    lost(),
]
ANY_CODE = Expected(any_code=True)
ABORTS = Expected(code=-signal.SIGABRT)


class VerdictTestCase(unittest.TestCase):
    maxDiff = None

    def judge(self, *reports, timed_out=False, expected=None):
        return judge(world(*reports), timed_out, CASE, expected)

    def assertVerdict(self, verdict: Verdict, outcome: TestOutcome, culprit=None, *parts: str):
        self.assertEqual((verdict.outcome, verdict.culprit), (outcome, culprit), verdict.message)
        self.assertInOrder(verdict.message, *parts)

    def assertInOrder(self, text: str, *parts: str):
        at = 0
        for part in parts:
            found = text.find(part, at)
            self.assertGreaterEqual(found, 0, f"{part!r} is not, or not in this order, in:\n{text}")
            at = found + len(part)
