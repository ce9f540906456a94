"""Tests what follows for ranks from how they end and from the time, as tables: no process, no clock."""

import unittest
from dataclasses import replace

from torch_testing_ext._process.ends import AFTER_SIGTERM
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Expected, RankEnding, RankReport, grace_periods
from torch_testing_ext.launch.watching.rules import (
    ENOUGH_IN_TURNS,
    FOREIGN_PROCESSES,
    IN_TURNS,
    LAUNCHED_PROCESSES,
    OWN_PROCESSES,
    RankWatch,
    Step,
    Stop,
    WatchAction,
)

TIMEOUT = 30.0


class RankWatchTest(unittest.TestCase):
    def setUp(self):
        self.begin()

    def begin(self, rules=OWN_PROCESSES, ranks=2, expected=None, timeout=TIMEOUT):
        self.watch = RankWatch(range(ranks), rules, expected, began=0.0, timeout=timeout)

    def end(self, rank, ending, at):
        """The rank ends its test, and its process ends, too."""
        self.watch.on_end(RankReport(rank, ending), at)
        self.watch.on_exit(rank)

    def next(self, action, now, until=None):
        self.assertEqual(self.watch.step(now), Step(action, until))

    def ends_the_rest(self, now):
        """The stacks of the ranks that still run are taken, and they are ended: first by SIGTERM, then by SIGKILL."""
        self.next(WatchAction.TAKE_STACKS, now)
        self.watch.on_stacks()
        self.next(WatchAction.END, now)
        self.watch.on_terminated(now)
        killed_at = now + AFTER_SIGTERM
        self.next(WatchAction.WAIT, now, killed_at)
        self.next(WatchAction.KILL, killed_at)
        self.watch.on_killed()
        self.next(WatchAction.WAIT, killed_at)
        for rank in set(self.watch.alive):
            self.watch.on_exit(rank)
        self.next(WatchAction.JUDGE, killed_at)


class TestRanksInTurns(RankWatchTest):
    """Ranks that wait for nobody: each has a time of its own, and a failure limits nobody's."""

    def begin_in_turns(self, ranks, timeout=TIMEOUT):
        self.watch = RankWatch([0], IN_TURNS, None, began=0.0, timeout=timeout, in_turns=range(1, ranks))

    def test_each_has_a_time_of_its_own(self):
        self.begin_in_turns(3)
        self.next(WatchAction.WAIT, 0.0, TIMEOUT)
        self.end(0, RankEnding.PASSED, 20.0)
        self.next(WatchAction.WAIT, 1e9, None)  # the next one is about to begin
        self.watch.on_turn(1, 25.0)
        self.next(WatchAction.WAIT, 40.0, 25.0 + TIMEOUT)
        self.watch.on_turn(2, 30.0)
        self.end(1, RankEnding.PASSED, 50.0)
        self.next(WatchAction.WAIT, 50.0, 30.0 + TIMEOUT)
        self.end(2, RankEnding.PASSED, 51.0)
        self.next(WatchAction.JUDGE, 51.0)

    def test_one_takes_too_long(self):
        self.begin_in_turns(3)
        self.end(0, RankEnding.PASSED, 1.0)
        self.watch.on_turn(1, 1.0)
        self.ends_the_rest(1.0 + TIMEOUT)
        self.assertTrue(self.watch.timed_out)

    def test_the_others_go_on_after_a_failure(self):
        self.begin_in_turns(2)
        self.end(0, RankEnding.FAILED, 1.0)
        self.watch.on_turn(1, 1.0)
        self.next(WatchAction.WAIT, 20.0, 1.0 + TIMEOUT)
        self.end(1, RankEnding.PASSED, 30.0)
        self.next(WatchAction.JUDGE, 30.0)

    def test_after_a_failure_only_the_first_ones_begin(self):
        self.begin_in_turns(2 * ENOUGH_IN_TURNS)
        self.end(0, RankEnding.ERROR, 1.0)
        self.assertEqual(self.watch.waiting, set(range(1, ENOUGH_IN_TURNS)))

    def test_without_a_time_out(self):
        self.begin_in_turns(2, timeout=None)
        self.end(0, RankEnding.PASSED, 1.0)
        self.watch.on_turn(1, 1.0)
        self.next(WatchAction.WAIT, 1e9)


class TestTheWayToTheVerdict(RankWatchTest):
    def test_all_pass(self):
        self.next(WatchAction.WAIT, 0.0, TIMEOUT)
        self.end(0, RankEnding.PASSED, 1.0)
        self.next(WatchAction.WAIT, 1.0, TIMEOUT)
        self.end(1, RankEnding.PASSED, 2.0)
        self.next(WatchAction.JUDGE, 2.0)
        self.assertIs(self.watch.stop, Stop.ALL_ENDED)

    def test_without_a_time_out(self):
        self.begin(timeout=None)
        self.next(WatchAction.WAIT, 1e9)

    def test_one_fails_and_the_other_runs_on(self):
        self.end(0, RankEnding.FAILED, 1.0)
        over = 1.0 + grace_periods.AFTER_FAILURE
        self.next(WatchAction.WAIT, 1.0, over)
        self.ends_the_rest(over)
        self.assertIs(self.watch.stop, Stop.GRACE_IS_OVER)

    def test_all_end_within_the_grace_period(self):
        self.end(0, RankEnding.FAILED, 1.0)
        self.end(1, RankEnding.ERROR, 1.5)
        self.next(WatchAction.JUDGE, 100.0)

    def test_time_out(self):
        self.end(0, RankEnding.PASSED, 1.0)
        self.next(WatchAction.WAIT, TIMEOUT - 0.1, TIMEOUT)
        self.ends_the_rest(TIMEOUT)
        self.assertTrue(self.watch.timed_out)

    def test_the_first_of_time_out_and_grace_period_counts(self):
        for failed_at, is_timeout in (
            (TIMEOUT, True),
            (TIMEOUT - grace_periods.AFTER_FAILURE, True),
            (TIMEOUT - grace_periods.AFTER_FAILURE - 0.5, False),
        ):
            with self.subTest(failed_at):
                self.begin()
                self.end(0, RankEnding.FAILED, failed_at)
                self.next(WatchAction.TAKE_STACKS, TIMEOUT)
                self.assertIs(self.watch.timed_out, is_timeout)

    def test_the_reason_stays_when_ranks_end_while_they_are_asked(self):
        self.next(WatchAction.TAKE_STACKS, TIMEOUT)
        for rank in (0, 1):
            self.end(rank, RankEnding.PASSED, TIMEOUT + 0.1)
        self.next(WatchAction.JUDGE, TIMEOUT + 0.1)
        self.assertTrue(self.watch.timed_out)

    def test_ranks_that_end_after_sigterm_are_not_killed(self):
        self.next(WatchAction.TAKE_STACKS, TIMEOUT)
        self.watch.on_stacks()
        self.watch.on_terminated(TIMEOUT)
        for rank in (0, 1):
            self.watch.on_exit(rank)
        self.next(WatchAction.JUDGE, TIMEOUT + 0.1)

    def test_ranks_whose_server_is_lost(self):
        """No rank has left an account then."""
        for rank in (0, 1):
            self.watch.on_exit(rank)
        self.next(WatchAction.JUDGE, 1.0)

    def test_give_up(self):
        """Nobody asks where the ranks are; those that have ended their test end, too."""
        self.watch.on_end(RankReport(0, RankEnding.PASSED), 1.0)
        self.watch.give_up()
        self.next(WatchAction.END, 1.0)
        self.assertFalse(self.watch.timed_out)

    def test_give_up_after_all_have_ended(self):
        self.watch.on_end(RankReport(0, RankEnding.PASSED), 1.0)
        self.watch.on_end(RankReport(1, RankEnding.FAILED), 1.0)
        self.next(WatchAction.JUDGE, 1.0)
        self.watch.give_up()
        self.next(WatchAction.END, 1.0)
        for rank in (0, 1):
            self.watch.on_exit(rank)
        self.next(WatchAction.JUDGE, 1.0)

    def test_give_up_after_the_time_out(self):
        self.next(WatchAction.TAKE_STACKS, TIMEOUT)
        self.watch.give_up()
        self.next(WatchAction.END, TIMEOUT)
        self.assertTrue(self.watch.timed_out)

    def test_foreign_processes_are_ended_without_stacks(self):
        self.begin(FOREIGN_PROCESSES)
        self.end(0, RankEnding.KILLED, 1.0)
        self.next(WatchAction.WAIT, 1.0, 1.0 + grace_periods.AFTER_FAILURE)
        self.next(WatchAction.END, 1.0 + grace_periods.AFTER_FAILURE)

    def test_ranks_of_a_launcher_are_not_ended(self):
        self.begin(LAUNCHED_PROCESSES)
        self.next(WatchAction.TAKE_STACKS, TIMEOUT)
        self.watch.on_stacks()
        self.next(WatchAction.JUDGE, TIMEOUT)

    def test_threads_are_judged_as_they_are(self):
        self.begin(replace(FOREIGN_PROCESSES, ends_ranks=False))
        self.next(WatchAction.JUDGE, TIMEOUT)


class TestLooking(RankWatchTest):
    def test_a_look_is_due(self):
        self.watch.look_due = 2.0
        self.next(WatchAction.WAIT, 1.0, 2.0)
        self.next(WatchAction.LOOK, 2.0)
        self.watch.look_due = 5.0
        self.next(WatchAction.WAIT, 2.0, 5.0)

    def test_nobody_looks_after_a_failure(self):
        self.watch.look_due = 1.5
        self.end(0, RankEnding.FAILED, 1.0)
        self.next(WatchAction.WAIT, 1.5, 1.0 + grace_periods.AFTER_FAILURE)

    def test_others_look_on_after_a_skip(self):
        self.watch.look_due = 1.5
        self.end(0, RankEnding.SKIPPED, 1.0)
        self.next(WatchAction.LOOK, 1.5)

    def test_a_look_at_the_time_out_comes_first(self):
        self.watch.look_due = TIMEOUT
        self.next(WatchAction.LOOK, TIMEOUT)
        self.watch.look_due = TIMEOUT + 1.0
        self.next(WatchAction.TAKE_STACKS, TIMEOUT)

    def test_a_finding(self):
        self.watch.on_finding()
        self.next(WatchAction.TAKE_STACKS, 1.0)
        self.assertFalse(self.watch.timed_out)


class TestLostRanks(RankWatchTest):
    def setUp(self):
        self.begin(LAUNCHED_PROCESSES, ranks=3)

    def test_the_first_is_named_soon(self):
        self.end(0, RankEnding.LOST, 10.0)
        self.next(WatchAction.WAIT, 10.0, 10.0 + grace_periods.AFTER_DEATH)
        self.next(WatchAction.NAME_LOST, 10.0 + grace_periods.AFTER_DEATH)
        self.watch.on_named()
        self.end(1, RankEnding.LOST, 11.0)
        self.next(WatchAction.WAIT, 11.0, 10.0 + grace_periods.AFTER_FAILURE_FOR_GOOD)

    def test_it_is_named_before_the_grace_period_after_another_ends(self):
        self.end(0, RankEnding.FAILED, 10.0)
        over = 10.0 + grace_periods.AFTER_FAILURE_FOR_GOOD
        self.end(1, RankEnding.LOST, over - 0.1)
        self.next(WatchAction.NAME_LOST, over - 0.1 + grace_periods.AFTER_DEATH)
        self.watch.on_named()
        self.next(WatchAction.TAKE_STACKS, over - 0.1 + grace_periods.AFTER_DEATH)

    def test_at_the_time_out_nobody_is_named(self):
        self.end(0, RankEnding.LOST, TIMEOUT - 0.1)
        self.next(WatchAction.TAKE_STACKS, TIMEOUT)


class TestPauses(RankWatchTest):
    def test_the_time_begins_again(self):
        self.watch.on_pause(50.0)
        self.next(WatchAction.WAIT, 50.0, 50.0 + TIMEOUT)

    def test_so_does_the_grace_period(self):
        self.end(0, RankEnding.KILLED, 1.0)
        self.watch.on_pause(50.0)
        self.next(WatchAction.WAIT, 50.0, 50.0 + grace_periods.AFTER_FAILURE)

    def test_without_a_time_out(self):
        self.begin(timeout=None)
        self.watch.on_pause(50.0)
        self.next(WatchAction.WAIT, 1e9)


class TestGrace(unittest.TestCase):
    def after(self, *ends, expected=None, rules=OWN_PROCESSES):
        watch = RankWatch([0], rules, expected)
        for ending, at in ends:
            watch.on_end(RankReport(0, ending), at)
        return watch

    def test_after_each_ending(self):
        table = {
            RankEnding.PASSED: None,
            RankEnding.SKIPPED: 10.0 + grace_periods.AFTER_SKIP,
            RankEnding.FAILED: 10.0 + grace_periods.AFTER_FAILURE,
            RankEnding.ERROR: 10.0 + grace_periods.AFTER_FAILURE,
            RankEnding.KILLED: 10.0 + grace_periods.AFTER_DEATH,
            RankEnding.EXITED: 10.0 + grace_periods.AFTER_DEATH,
        }
        for ending, ends in table.items():
            with self.subTest(ending):
                watch = self.after((ending, 10.0))
                self.assertEqual(watch.grace_ends, ends)
                self.assertEqual(watch.has_failed, ending.is_failure)

    def test_codes_that_the_test_expects(self):
        watch = self.after((RankEnding.EXITED, 10.0), (RankEnding.SKIPPED, 11.0), expected=Expected(any_code=True))
        self.assertEqual((watch.grace_ends, watch.has_failed), (None, False))

    def test_a_skip_of_a_foreign_process(self):
        watch = self.after((RankEnding.SKIPPED, 10.0), rules=FOREIGN_PROCESSES)
        self.assertEqual((watch.grace_ends, watch.has_failed), (None, False))

    def test_the_first_end_counts(self):
        """A skip gives time, and a death takes it."""
        skip, death = (RankEnding.SKIPPED, 10.0), (RankEnding.KILLED, 12.0)
        self.assertEqual(self.after(skip, death).grace_ends, 12.0 + grace_periods.AFTER_DEATH)
        self.assertEqual(self.after(death, (RankEnding.FAILED, 12.3)).grace_ends, 12.0 + grace_periods.AFTER_DEATH)

    def test_stacks_of_ranks_that_wait_for_a_dead_one_take_less_time(self):
        self.assertEqual(self.after((RankEnding.FAILED, 1.0)).stacks_timeout, grace_periods.FOR_STACKS)
        self.assertEqual(self.after((RankEnding.KILLED, 1.0)).stacks_timeout, grace_periods.FOR_STACKS_AFTER_DEATH)


if __name__ == "__main__":
    run_tests()
