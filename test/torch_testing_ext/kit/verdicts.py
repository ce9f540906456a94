"""Reports of ranks with every ending, as data, for the tests of the verdict."""

import signal
import unittest
from dataclasses import replace

from torch_testing_ext.launch import Case, Cause, Expected, Outcome, RankEnding, RankReport, Verdict
from torch_testing_ext.launch.judging import judge

CASE = Case("TestThing.test_x", "python test_thing.py TestThing.test_x", "/home/me/test_thing.py")

VICTIM_ERROR = "RuntimeError: [../gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:12345"


# -- ranks, each with one ending. `world` numbers them and has them all start at 0 on the common clock.


def passed(seconds=1.0):
    return RankReport(-1, RankEnding.PASSED, seconds, code=0)


def skipped(reason="no luck", code=86):
    return RankReport(-1, RankEnding.SKIPPED, 0.1, code=code, summary=reason)


def failed(summary="AssertionError: 1 != 2", seconds=1.0):
    return RankReport(-1, RankEnding.FAILED, seconds, code=10, summary=summary, traceback=f"Traceback:\n{summary}\n")


def raised(summary="ValueError: broken", seconds=1.0):
    return RankReport(-1, RankEnding.ERROR, seconds, code=10, summary=summary, traceback=f"Traceback:\n{summary}\n")


def victim(seconds=1.02):
    return replace(raised(VICTIM_ERROR, seconds), cause=Cause.LOST_PEER)


def exited(code, seconds=1.0):
    return RankReport(-1, RankEnding.EXITED, seconds, code=code)


def killed(by, seconds=1.0):
    return RankReport(-1, RankEnding.KILLED, seconds, code=-by)


def stopped(seconds=1.5, **texts):
    return RankReport(-1, RankEnding.STOPPED, seconds, code=-signal.SIGTERM, **texts)


def lost(reason="the process that starts the ranks (pid 7) was killed by signal 9"):
    return RankReport(-1, RankEnding.LOST, 1.0, summary=reason)


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

    def assertVerdict(self, verdict: Verdict, outcome: Outcome, culprit=None, *parts: str):
        self.assertEqual((verdict.outcome, verdict.culprit), (outcome, culprit), verdict.message)
        self.assertInOrder(verdict.message, *parts)

    def assertInOrder(self, text: str, *parts: str):
        at = 0
        for part in parts:
            found = text.find(part, at)
            self.assertGreaterEqual(found, 0, f"{part!r} is not, or not in this order, in:\n{text}")
            at = found + len(part)
