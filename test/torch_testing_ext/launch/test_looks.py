"""Tests when ranks are asked for their collectives: soon if they are idle, seldom while one computes."""

import subprocess
import sys
import unittest
from types import SimpleNamespace
from unittest import mock

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
        return watched.are_idle(pids)

    def test_a_process_that_waits(self):
        pid, watched = self.start("input()"), idleness.Idleness()
        self.assertIsNone(self.look(watched, pid))
        while not self.look(watched, pid):  # until it has come to its wait
            pass

    def test_a_process_that_computes(self):
        waiting, computing, watched = self.start("input()"), self.start("while True: pass"), idleness.Idleness()
        self.assertIsNone(self.look(watched, waiting, computing))
        for _ in range(3):
            self.assertIs(self.look(watched, waiting, computing), False)

    def test_what_was_seen_before_is_forgotten(self):
        pid, watched = self.start("input()"), idleness.Idleness()
        self.look(watched, pid)
        self.assertIsNone(watched.are_idle([pid]))  # too early
        watched.forget()
        self.assertIsNone(self.look(watched, pid))
        self.assertIsNotNone(self.look(watched, pid))

    def test_a_system_that_shows_nothing(self):
        watched = idleness.Idleness()
        with mock.patch.object(idleness.system, "cpu_seconds", return_value=None):
            self.assertIsNone(self.look(watched, 1))
            self.assertTrue(self.look(watched, 1))


class TestLooks(unittest.TestCase):
    """Ranks that never answer: only when they are asked matters."""

    def asked(self, is_idle, until):
        clock, times = Clock(), []
        run = SimpleNamespace(
            pids=(1, 2),
            look=lambda: times.append(round(clock.time - 100.0, 2)),
            job=SimpleNamespace(look=lambda rank: mock.Mock(read_bytes=mock.Mock(side_effect=OSError))),
        )
        cpu = [0.0]

        def cpu_seconds(pid):
            cpu[0] += 0.0 if is_idle(clock.time - 100.0) else 1.0
            return cpu[0]

        with (
            mock.patch.object(looks, "now", clock),
            mock.patch.object(idleness, "now", clock),
            mock.patch.object(idleness.system, "cpu_seconds", cpu_seconds),
        ):
            tested = looks.Looks(run, 1e9, False, Logs([], Sanitize()))
            while tested.due - 100.0 < until:
                self.assertGreater(tested.due, clock.time)
                clock.time = tested.due
                self.assertIsNone(tested.step([0, 1], {}))
        return times

    def test_idle_ranks_are_asked_after_a_second(self):
        times = self.asked(lambda time: True, 10.0)
        self.assertAlmostEqual(times[0], looks.FIRST_LOOK, delta=0.01)
        self.assertEqual(len(times), 3)

    def test_ranks_that_compute_are_asked_seldom(self):
        times = self.asked(lambda time: False, 10.0)
        self.assertAlmostEqual(times[0], looks.FACTOR_IF_BUSY * looks.FIRST_LOOK, delta=0.01)
        self.assertEqual(len(times), 2)

    def test_ranks_that_have_just_become_idle(self):
        times = self.asked(lambda time: time > 1.6, 3.0)
        self.assertLess(times[0], 2.3)
        self.assertGreater(times[0], 1.6)


if __name__ == "__main__":
    run_tests()
