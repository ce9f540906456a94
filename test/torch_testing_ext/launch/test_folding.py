"""Which failures of ranks are shown as one: the same ones but for accidents, never different ones."""

import unittest
from dataclasses import replace

from kit.verdicts import CASE, but, failed, passed, raised, stopped, victim, world

from torch_testing_ext._process.same_texts import warnings_once, without_accidents
from torch_testing_ext.launch import Cause
from torch_testing_ext.launch.judging import judge


def message_of(*reports):
    return judge(world(*reports), False, CASE).message


class WarningsTest(unittest.TestCase):
    def test_each_is_told_once(self):
        one = "/x/test_x.py:16: UserWarning: careful\n  warnings.warn(1)\n[W1124 socket.cpp:20] slow\n"
        printed = "step\n  loss 1\nstep\n  loss 1\n"
        self.assertEqual(warnings_once(one * 3 + printed), (one + printed).rstrip())
        self.assertEqual(warnings_once(one + printed + one, times=0), printed.rstrip())
        self.assertEqual(warnings_once("Warning: it is ours\n" * 2), "Warning: it is ours\nWarning: it is ours")


class OfAllTest(unittest.TestCase):
    def test_one_rank_tells_what_failed_in_all(self):
        told = failed("PropertyFailure: test_x(n=1) fails on rank 1 of 2: boom")
        other = failed("PropertyFailure: failed in the example that rank 1 reports")
        reports = [but(one, cause=Cause.OF_ALL) for one in world(other, told)]
        reports[0] = but(reports[0], ended=reports[1].ended + 1)
        message = judge(reports, False, replace(CASE, show_command="show")).message
        self.assertEqual(message.splitlines()[:2], ["test_x(n=1) fails on rank 1 of 2: boom", "  ranks 0, 1  failed"])


class AlikeTest(unittest.TestCase):
    def assertFolded(self, *summaries):
        message = message_of(*map(failed, summaries))
        self.assertIn(
            f"\n  ranks 0-{len(summaries) - 1} failed in the same way after 1.00 s: {summaries[0]}\n", message
        )
        self.assertEqual(message.count("Traceback:"), 1)
        self.assertIn(
            f"\nranks 0-{len(summaries) - 1} failed in the same way; rank 0's traceback:\nTraceback:\n", message
        )

    def assertNotFolded(self, *summaries):
        message = message_of(*map(failed, summaries))
        self.assertNotIn("alike", message)
        for rank, summary in enumerate(summaries):
            self.assertIn(f"\n  rank {rank}: failed after 1.00 s: {summary}\n", message)
            self.assertIn(f"\nrank {rank}'s traceback:\nTraceback:\n{summary}\n", message)

    def test_the_same_failure(self):
        self.assertFolded(*["AssertionError: 1 != 2"] * 4)

    def test_the_own_number_and_addresses(self):
        for pattern in (
            "RuntimeError: [rank{0}]: no peer",
            "RuntimeError: [Rank {0}] no peer",
            "RuntimeError: no peer (pid 100{0})",
            "KeyError: <object object at 0x7f00{0}>",
        ):
            with self.subTest(pattern=pattern):
                self.assertFolded(*(pattern.format(rank) for rank in range(3)))

    def test_different_values_are_different_failures(self):
        for pattern in (
            "AssertionError: {0} != 7",
            "AssertionError: Greatest absolute difference: 0.{0}",
            "AssertionError: 0x7f0{0} != 0x7f00",
            "RuntimeError: shape [4, {0}]",
            "RuntimeError: no layer for rank {0}",
            "RuntimeError: a tensor of rank {0}",
            "RuntimeError: [frank{0}]",
            "RuntimeError: step {0} took 1.0 s",
            "RuntimeError: cuda:{0} is broken",
        ):
            with self.subTest(pattern=pattern):
                self.assertNotFolded(*(pattern.format(rank) for rank in range(3)))

    def test_another_ranks_number_is_kept(self):
        self.assertNotFolded(
            "ValueError: [rank2] is lost", "ValueError: [rank3] is lost", "ValueError: [rank4] is lost"
        )
        self.assertNotFolded(*(f"ValueError: [rank{rank}] waits for [rank{rank - 1}]" for rank in range(3)))
        self.assertNotFolded("ValueError: [rank1] failed", "ValueError: [rank1] failed")  # its own, and another's

    def test_different_places_are_different_failures(self):
        there = but(failed(), traceback="Traceback:\n  line 2\nAssertionError: 1 != 2")
        message = message_of(failed(), there)
        self.assertNotIn("alike", message)
        self.assertEqual(message.count("'s traceback:"), 2)

    def test_a_failure_and_an_error_are_different(self):
        error = but(raised("AssertionError: 1 != 2"), code=10)
        self.assertNotIn("failed in the same way after", message_of(failed(), error))

    def test_some_of_the_ranks(self):
        other = failed("AssertionError: another", 0.5)
        message = message_of(failed(seconds=1.0), passed(), failed(seconds=1.2), other, failed(seconds=1.1))
        self.assertEqual(
            message,
            """rank 3 of 5 failed: AssertionError: another
(TestThing.test_x, 1.2 s after its start)

  rank 3: failed after 0.50 s: AssertionError: another
  ranks 0, 2, 4 failed in the same way after 1.00 to 1.20 s: AssertionError: 1 != 2
  rank 1: passed after 1.00 s

rank 3's traceback:
Traceback:
AssertionError: another

ranks 0, 2, 4 failed in the same way; rank 0's traceback:
Traceback:
AssertionError: 1 != 2

To run it alone:
  python test_thing.py TestThing.test_x""",
        )

    def test_victims_stay_apart_from_what_made_them(self):
        message = message_of(victim(1.1), victim(1.0), victim(1.2))
        self.assertNotIn("in the same way", message)
        self.assertEqual(message.count("because of rank 1"), 2)

    def test_outputs(self):
        def saying(words):
            return but(failed(), output=words)

        message = message_of(saying("careful"), saying("careful"), saying("other"), saying("[rank3] careful"))
        self.assertIn("\nranks 0, 1 printed the same; rank 0's last lines of output:\ncareful\n", message)
        self.assertIn("\nrank 2's last lines of output:\nother\n", message)
        self.assertIn("\nrank 3's last lines of output:\n[rank3] careful\n", message)

    def test_a_rank_that_still_runs_has_its_own_line(self):
        message = judge(world(failed(), failed(), stopped(), stopped()), True, CASE).message
        self.assertIn("\n  ranks 0, 1 failed in the same way after 1.00 s: AssertionError: 1 != 2\n", message)
        for rank in 2, 3:
            self.assertIn(f"\n  rank {rank}: still running after 1.50 s, terminated\n", message)

    def test_durations_are_accidents_between_attempts(self):
        first, second = (
            "rank 1 failed 0.1 s into T.test: x\n  after 0.10 s",
            "rank 1 failed 0.7 s into T.test: x\n  after 0.72 s",
        )
        self.assertEqual(without_accidents(first), without_accidents(second))
        self.assertNotEqual(without_accidents("0.1 != 0.2"), without_accidents("0.1 != 0.3"))


if __name__ == "__main__":
    unittest.main()
