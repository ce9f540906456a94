"""Tests when ranks are asked for their collectives: soon if they are idle, seldom while one computes."""

import subprocess
import sys
import unittest
from types import SimpleNamespace
from unittest import mock

from torch_testing_ext._collectives.raw import pack
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import idleness, looks
from torch_testing_ext.launch.job import Sanitize
from torch_testing_ext.launch.sanitizer_logs import Logs


def child(code):
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class Clock:
    """The time of a test, which does not pass by itself."""

    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


class TestIdleness(unittest.TestCase):
    def setUp(self):
        self.clock = Clock()
        patch = mock.patch.object(idleness, "now", self.clock)
        patch.start()
        self.addCleanup(patch.stop)

    def start(self, code):
        process = child(f"print(flush=True)\n{code}")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        process.stdout.readline()
        return process.pid

    def look(self, watched, *pids):
        self.clock.time += idleness.INTERVAL
        return watched.idle(pids)

    def test_a_process_that_waits(self):
        pid, watched = self.start("input()"), idleness.Idleness()
        self.assertIsNone(self.look(watched, pid))
        while not self.look(watched, pid):  # until it has come to its wait
            pass

    def test_a_process_that_computes(self):
        waiting, computing, watched = self.start("input()"), self.start("while True: pass"), idleness.Idleness()
        self.assertIsNone(self.look(watched, waiting, computing))
        for _ in range(3):
            self.assertNotIn(computing, self.look(watched, waiting, computing))
        while self.look(watched, waiting, computing) != {waiting}:  # until it has come to its wait
            pass

    def test_what_was_seen_before_is_forgotten(self):
        pid, watched = self.start("input()"), idleness.Idleness()
        self.look(watched, pid)
        self.assertIsNone(watched.idle([pid]))  # too early
        watched.forget()
        self.assertIsNone(self.look(watched, pid))
        self.assertIsNotNone(self.look(watched, pid))

    def test_a_system_that_shows_nothing(self):
        watched = idleness.Idleness()
        with mock.patch.object(idleness.system, "cpu_seconds", return_value=None):
            self.assertIsNone(self.look(watched, 1))
            self.assertEqual(self.look(watched, 1), {1})


class TestLooks(unittest.TestCase):
    """Ranks that have issued nothing: only when they are asked matters."""

    def asked(self, is_idle, until, ranks=2, answers=lambda rank, time: True):
        """When which ranks are asked. `is_idle`: whether a rank is so at a time; `answers`: whether it does by then."""
        clock, found, answered = Clock(), [], [0.0] * ranks

        def ask(chosen):
            found.append((round(clock.time - 100.0, 2), list(chosen)))
            answered[:] = [clock.time] * ranks
            clock.time += 0.001  # the kernel may give the processor to the ranks

        def read(rank):
            if not answers(rank, clock.time - 100.0):
                raise FileNotFoundError
            return pack([], [], [], "", answered[rank])

        run = SimpleNamespace(
            pids=tuple(range(ranks)),
            look=ask,
            job=SimpleNamespace(look=lambda rank: SimpleNamespace(read_bytes=lambda: read(rank))),
        )
        cpu = [0.0] * ranks

        def cpu_seconds(pid):
            cpu[pid] += 0.0 if is_idle(pid, clock.time - 100.0) else 1.0
            return cpu[pid]

        with (
            mock.patch.object(looks, "now", clock),
            mock.patch.object(idleness, "now", clock),
            mock.patch.object(idleness.system, "cpu_seconds", cpu_seconds),
        ):
            tested = looks.Looks(run, 1e9, False, Logs([], Sanitize()))
            while tested.due - 100.0 < until:
                clock.time = max(clock.time, tested.due)
                before = len(found), tested.due
                self.assertIsNone(tested.step(range(ranks), {}))
                self.assertNotEqual((len(found), tested.due), before)
        return found

    def test_idle_ranks_are_asked_after_a_second(self):
        found = self.asked(lambda rank, time: True, 10.0)
        self.assertAlmostEqual(found[0][0], looks.FIRST_LOOK, delta=0.01)
        self.assertEqual([ranks for _, ranks in found], [[0, 1]] * 4)

    def test_ranks_whose_server_is_busy(self):
        """It passes the request on when it has imported something; that is no reason to look at longer intervals."""
        found = self.asked(lambda rank, time: True, 12.0, answers=lambda rank, time: time > 8.0)
        self.assertEqual(len(found), 2)
        self.assertAlmostEqual(found[1][0], 8.0 + looks.FIRST_LOOK * looks.GROWTH, delta=looks.LONGEST_PAUSE + 0.01)

    def test_a_rank_that_does_not_answer(self):
        """It holds the GIL, or is stopped: nobody waits long for it."""
        all_answer = self.asked(lambda rank, time: True, 30.0)
        found = self.asked(lambda rank, time: True, 30.0, answers=lambda rank, time: rank == 0)
        self.assertGreater(len(found), 3)
        self.assertLess(found[1][0], all_answer[1][0] + looks.READ_TIMEOUT + looks.LONGEST_PAUSE + 0.01)

    def test_ranks_that_never_answer(self):
        found = self.asked(lambda rank, time: True, 60.0, answers=lambda rank, time: False)
        self.assertGreater(len(found), 1)

    def test_ranks_that_compute_are_asked_seldom(self):
        found = self.asked(lambda rank, time: False, 10.0)
        self.assertAlmostEqual(found[0][0], looks.FACTOR_IF_BUSY * looks.FIRST_LOOK, delta=0.01)
        self.assertEqual([ranks for _, ranks in found], [[0, 1]] * 2)

    def test_ranks_that_have_just_become_idle(self):
        first, _ = self.asked(lambda rank, time: time > 1.6, 3.0)[0]
        self.assertLess(first, 2.3)
        self.assertGreater(first, 1.6)

    def test_those_that_wait_while_one_computes(self):
        """A rank that computes is asked no more often than if all did."""
        found = self.asked(lambda rank, time: rank > 0, 40.0, ranks=3)
        self.assertEqual(found[0][1], [1, 2])
        self.assertAlmostEqual(found[0][0], looks.FIRST_LOOK, delta=0.01)
        self.assertGreater(len(found), 5)
        busy = self.asked(lambda rank, time: False, 40.0, ranks=3)
        asked = [time for time, ranks in found if 0 in ranks]
        self.assertLessEqual(len(asked), len(busy))
        self.assertAlmostEqual(asked[0], busy[0][0], delta=0.01)

    def test_one_that_waits_alone(self):
        """It has nobody to disagree with."""
        found = self.asked(lambda rank, time: rank == 1, 10.0, ranks=3)
        self.assertEqual([ranks for _, ranks in found], [[0, 1, 2]] * 2)

    def test_ranks_that_have_ended_before_the_second_look(self):
        clock = Clock()
        with mock.patch.object(looks, "now", clock), mock.patch.object(idleness, "now", clock):
            tested = looks.Looks(SimpleNamespace(pids=(1, 2)), 1e9, False, Logs([], Sanitize()))
            tested._look_again(looks.CONFIRMATION, [0])
            clock.time = tested.due
            self.assertIsNone(tested.step([1], {}))
            self.assertGreater(tested.due, clock.time)


if __name__ == "__main__":
    run_tests()
