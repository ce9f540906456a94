"""Tests what the coordinator of a launch does next, from what the ranks have said, as a table: no process, no clock."""

import unittest

from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import SanitizeKind
from torch_testing_ext._process import messages
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Case, Cause, RankEnding, Verdict, grace_periods
from torch_testing_ext.launch.accounts import OwnWarning, RaisedError, RankAccount
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.launched.round_messages import (
    AskForStacks,
    FromCoordinator,
    FromRank,
    RankBegins,
    RankEnds,
    RankHeard,
    RankJoined,
    RankStacks,
    RankTells,
    Round,
    RoundJudged,
    RoundRefused,
)
from torch_testing_ext.launch.launched.rounds import Meeting, RoundState
from torch_testing_ext.launch.watching.rules import WatchAction

NOTHING = RankStacks("", b"")


def begins(name="test_x", timeout=None):
    return RankBegins(Case(name), "/tmp/x", timeout, False, Sanitize())


def account(ending=RankEnding.PASSED, at=10.0):
    return RankAccount(ending, 0.0, at, "why")


class RoundTest(unittest.TestCase):
    def setUp(self):
        self.left = {}
        self.round = RoundState(3, 2, self.left)

    def begin(self, *ranks, timeout=None, now=0.0):
        for rank in ranks:
            self.round.on_begin(rank, begins(timeout=timeout), now)

    def run_both(self, timeout=None):
        self.begin(0, 1, timeout=timeout)
        self.meeting(Meeting.COMPLETE)
        self.round.start(0.0)

    def end(self, rank, ending=RankEnding.PASSED, at=10.0, number=3):
        self.round.on_end(rank, RankEnds(number, account(ending, at)))

    def meeting(self, state, now=0.0):
        self.assertIs(self.round.meeting(now), state)

    def next(self, action, now=0.0):
        self.assertIs(self.round.watch.step(now).action, action)

    def due(self):
        return self.round.watch.step(0.0).until

    def test_nothing_to_do(self):
        self.meeting(Meeting.INCOMPLETE, 1e9)
        self.assertIsNone(self.round.meeting_ends)

    def test_it_waits_until_all_have_begun(self):
        self.begin(1)
        self.meeting(Meeting.INCOMPLETE, 1e9)
        self.begin(0)
        self.meeting(Meeting.COMPLETE)

    def test_a_rank_that_does_not_come_in_time(self):
        self.begin(1, timeout=30.0, now=5.0)
        self.assertEqual(self.round.meeting_ends, 35.0)
        self.meeting(Meeting.INCOMPLETE, 34.9)
        self.meeting(Meeting.IMPOSSIBLE, 35.0)
        self.assertEqual(self.round.why_refused(35.0), "rank 0 of 2 did not start test_x in time")

    def test_a_rank_that_left_before(self):
        self.round.on_leave(0, 1.0)
        self.begin(1)
        self.meeting(Meeting.IMPOSSIBLE)
        self.assertIn("rank 0 of 2 is missing: its process was killed", self.round.why_refused(0.0))

    def test_a_rank_that_left_in_an_earlier_round(self):
        self.left[0] = 1.0
        self.begin(1)
        self.meeting(Meeting.IMPOSSIBLE)
        self.assertIn("rank 0 of 2 is missing: its process was killed", self.round.why_refused(0.0))

    def test_a_rank_that_has_ended_its_tests(self):
        self.round = RoundState(3, 2, {}, done={0: ()})
        self.begin(1)
        self.meeting(Meeting.IMPOSSIBLE)
        self.assertIn("rank 0 of 2 has ended its tests", self.round.why_refused(0.0))
        self.begin(0)
        self.meeting(Meeting.COMPLETE)

    def test_a_rank_that_has_not_come_to_an_earlier_round(self):
        self.round = RoundState(3, 2, {}, absent={0})
        self.begin(1, timeout=30.0)
        self.assertIn("rank 0 of 2 has not come", self.round.why_refused(0.0))
        self.assertFalse(self.round.is_overdue(29.9))
        self.begin(0)
        self.meeting(Meeting.COMPLETE)

    def test_different_tests(self):
        self.begin(1)
        self.round.on_begin(0, begins("test_y"), 0.0)
        self.meeting(Meeting.IMPOSSIBLE)
        self.assertEqual(
            self.round.why_refused(0.0),
            "the ranks of the launcher run different tests: rank 0 runs test_y; rank 1 runs test_x",
        )

    def test_all_ends(self):
        self.run_both()
        self.end(1)
        self.next(WatchAction.WAIT, 1e9)
        self.end(0)
        self.next(WatchAction.JUDGE)

    def test_an_end_of_an_earlier_round(self):
        self.run_both()
        self.end(0, number=2)
        self.assertEqual(self.round.running, [0, 1])

    def test_the_time_begins_when_all_have_begun(self):
        self.begin(0, 1, timeout=30.0, now=0.0)
        self.round.start(20.0)
        self.assertEqual(self.due(), 50.0)
        self.next(WatchAction.WAIT, 49.9)
        self.judges_the_rest(50.0)
        self.assertTrue(self.round.watch.timed_out)

    def judges_the_rest(self, now):
        """The ranks that still run are asked where they are; no process is ended."""
        self.next(WatchAction.TAKE_STACKS, now)
        self.round.watch.on_stacks()
        self.next(WatchAction.JUDGE, now)

    def test_others_get_time_after_a_failure_or_skip(self):
        for ending in (RankEnding.FAILED, RankEnding.ERROR, RankEnding.SKIPPED):
            with self.subTest(ending):
                self.setUp()
                self.run_both()
                self.end(0, ending, at=10.0)
                self.assertEqual(self.due(), 10.0 + grace_periods.AFTER_FAILURE_FOR_GOOD)
                self.next(WatchAction.WAIT, 10.0)
                self.judges_the_rest(10.0 + grace_periods.AFTER_FAILURE_FOR_GOOD)
                self.assertFalse(self.round.watch.timed_out)

    def test_a_rank_that_leaves_is_named_soon_and_others_get_time(self):
        self.run_both()
        self.round.on_leave(0, 10.0)
        self.next(WatchAction.WAIT, 10.0)
        self.next(WatchAction.NAME_LOST, 10.0 + grace_periods.AFTER_DEATH)
        self.assertEqual(self.round.lost, [0])
        self.round.watch.on_named()
        self.next(WatchAction.WAIT, 10.0 + grace_periods.AFTER_DEATH)
        self.judges_the_rest(10.0 + grace_periods.AFTER_FAILURE_FOR_GOOD)

    def test_a_rank_that_leaves_before_all_have_begun(self):
        self.begin(0, 1)
        self.round.on_leave(0, 10.0)
        self.meeting(Meeting.COMPLETE)
        self.round.start(11.0)
        self.assertEqual(self.round.running, [1])
        self.next(WatchAction.NAME_LOST, 10.0 + grace_periods.AFTER_DEATH)

    def test_a_rank_that_leaves_after_its_test(self):
        self.run_both()
        self.end(0)
        self.round.on_leave(0, 10.0)
        self.assertEqual((self.round.lost, self.round.running), ([], [1]))
        self.next(WatchAction.WAIT, 1e9)

    def test_all_leave(self):
        self.run_both()
        for rank in (0, 1):
            self.round.on_leave(rank, 10.0)
        self.next(WatchAction.JUDGE, 10.0)

    def test_reports(self):
        self.round = RoundState(3, 3, self.left)
        self.begin(0, 1, 2)
        self.round.start(4.0)
        error = RaisedError(sites=(Site("/x.py", 3, "f"),), details="Expected: 1\nGot: 2")
        account = RankAccount(RankEnding.ERROR, 0.0, 10.0, "why", error=error)
        self.round.on_end(0, RankEnds(3, account))
        self.round.on_leave(1, 5.0)
        ended, lost, running = (self.round.report(rank, 11.0, {2: NOTHING}) for rank in range(3))
        self.assertEqual((ended.ending, ended.seconds, ended.summary), (RankEnding.ERROR, 6.0, "why"))
        self.assertEqual((ended.error, ended.account), (error, account))
        self.assertEqual((lost.ending, lost.seconds), (RankEnding.LOST, 1.0))
        self.assertEqual((running.ending, running.seconds), (RankEnding.STOPPED, 7.0))


class TestMessages(unittest.TestCase):
    def test_each_arrives_as_it_was_sent(self):
        sanitize = Sanitize(frozenset({SanitizeKind.CALLS, SanitizeKind.NAN}), True, 7)
        warned = OwnWarning("careful", "builtins.UserWarning", "/x.py", 3)
        full = RankAccount(
            RankEnding.ERROR,
            started=1.0,
            ended=2.0,
            summary="a",
            traceback="b",
            code=10,
            imported=("torch.fx",),
            notes=("note",),
            warnings=(warned,),
            extras="{}",
            memory=((0, 1, 2),),
            collectives=b"\x80x",
            error=RaisedError(
                "RuntimeError", Cause.LOST_PEER, (Site("/x.py", 3, "f"),), "details", ("related",), "example"
            ),
        )
        sent = (
            RankJoined(1, "token"),
            RankBegins(Case("T.test_x", "python x", "/x.py"), "/tmp/x", 1.5, True, sanitize),
            RankEnds(2, full),
            RankStacks("File", b"\x80"),
            RankTells(("a report",)),
            RankHeard(),
            Round(2, "/tmp/x", "127.0.0.1", 5000, sanitize),
            RoundRefused("why"),
            AskForStacks(),
            RoundJudged(Verdict(TestOutcome.FAILED, "text", 1, None), (1,), (full, None), True),
        )
        kinds = messages.by_name(FromRank) | messages.by_name(FromCoordinator)
        self.assertEqual({type(message) for message in sent}, set(kinds.values()))
        for message in sent:
            self.assertEqual(messages.from_json(messages.to_json(message), kinds), message)


if __name__ == "__main__":
    run_tests()
