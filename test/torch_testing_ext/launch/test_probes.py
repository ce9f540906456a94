"""Tests when ranks are asked for their collectives: soon if they are idle, seldom while one computes."""

import math
import subprocess
import sys
import unittest
from types import SimpleNamespace

from torch_testing_ext._collectives.proof.proof_of_hang import ProofRules
from torch_testing_ext._collectives.records.raw_records import pack_record
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import probes
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.logs_of_ranks import Logs
from torch_testing_ext.launch.probes import Asked, Confirming, Pace, Prober, Waiting
from torch_testing_ext.launch.watching.looks import FIRST_LOOK


def child(code):
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class TestIdleness(unittest.TestCase):
    def setUp(self):
        self.now = 100.0

    def start(self, code):
        process = child(f"print(flush=True)\n{code}")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        process.stdout.readline()
        return process.pid

    def look(self, watched, *pids):
        self.now += probes.IDLE_INTERVAL
        return watched.idle(pids, self.now)

    def test_a_process_that_waits(self):
        pid, watched = self.start("input()"), probes.Idleness()
        self.assertIsNone(self.look(watched, pid))
        while not self.look(watched, pid):  # until it has come to its wait
            pass

    def test_a_process_that_computes(self):
        waiting, computing, watched = self.start("input()"), self.start("while True: pass"), probes.Idleness()
        self.assertIsNone(self.look(watched, waiting, computing))
        for _ in range(3):
            self.assertNotIn(computing, self.look(watched, waiting, computing))
        while self.look(watched, waiting, computing) != {waiting}:  # until it has come to its wait
            pass

    def test_a_process_that_may_only_wait_for_its_gpu(self):
        watched = probes.Idleness(lambda pid: math.inf, may_spin=lambda pid: pid == 2)
        self.assertIsNone(self.look(watched, 1, 2))
        self.assertEqual(self.look(watched, 1, 2), {2})

    def test_what_was_seen_before_is_forgotten(self):
        pid, watched = self.start("input()"), probes.Idleness()
        self.look(watched, pid)
        self.assertIsNone(watched.idle([pid], self.now))  # too early
        watched.forget()
        self.assertIsNone(self.look(watched, pid))
        self.assertIsNotNone(self.look(watched, pid))

    def test_a_system_that_shows_nothing(self):
        watched = probes.Idleness(lambda pid: None)
        self.assertIsNone(self.look(watched, 1))
        self.assertEqual(self.look(watched, 1), {1})


class TestStates(unittest.TestCase):
    """When each state is due, and what follows."""

    def test_the_pace(self):
        pace = Pace.first(10.0)
        self.assertEqual((pace.of_idle, pace.of_all, pace.latest), (1.0, 1.0, 13.0))
        some = pace.slower(11.0, were_all_asked=False)
        self.assertEqual((some.of_idle, some.of_all, some.latest), (1.6, 1.0, 13.0))
        every = pace.slower(11.0, were_all_asked=True)
        self.assertEqual((every.of_idle, every.of_all, every.latest), (1.6, 1.6, 11.0 + 4.8))
        self.assertEqual((every.again().of_idle, every.again().latest), (1.0, 11.0 + 4.8))
        for _ in range(20):
            pace = pace.slower(11.0, were_all_asked=True)
        self.assertEqual((pace.of_idle, pace.of_all), (probes.LONGEST, probes.LONGEST))

    def test_waiting_ends_at_the_latest_moment_of_the_pace(self):
        waiting = Waiting.begin(Pace.first(10.0), 10.0)
        self.assertEqual(waiting.due, 10.75)  # so that idleness is seen by 11.0
        self.assertEqual(waiting.later(10.75).due, 11.0)
        self.assertEqual(waiting.later(12.9).due, 13.0)

    def test_answers_are_read_at_growing_intervals(self):
        asked = Asked.begin(Pace.first(0.0), 10.0, [0, 1])
        dues = [asked.due]
        for _ in range(5):
            asked = asked.read(dues[-1], 1, 2)
            dues.append(asked.due)
        pauses = [round(later - earlier, 2) for earlier, later in zip([10.0, *dues], dues, strict=False)]
        self.assertEqual(pauses, [0.03, 0.06, 0.12, 0.24, 0.25, 0.25])

    def test_how_long_answers_are_waited_for(self):
        asked = Asked.begin(Pace.first(0.0), 10.0, [0, 1])
        self.assertIsNone(asked.read(10.03, 2, 2))
        self.assertIsNotNone(asked.read(19.9, 0, 2))
        self.assertIsNone(asked.read(20.0, 0, 2))
        one = asked.read(15.0, 1, 2)
        self.assertIsNotNone(one.read(15.9, 1, 2))
        self.assertIsNone(one.read(16.0, 1, 2))


class Ranks:
    """Ranks that have issued nothing, at a time that passes only between the steps."""

    def __init__(self, number, is_idle, answers):
        self.pids = tuple(range(number))
        self.job = SimpleNamespace(
            world_size=number, recorder=lambda rank: SimpleNamespace(read_bytes=lambda: self.read(rank))
        )
        self.time, self.found = 0.0, []
        self._is_idle, self._answers = is_idle, answers
        self._answered, self._cpu = [0.0] * number, [0.0] * number

    def probe(self, ranks):
        self.found.append((round(self.time, 2), list(ranks)))
        self._answered = [self.time] * len(self.pids)
        self.time += 0.001  # the kernel may give the processor to the ranks

    def read(self, rank):
        if not self._answers(rank, self.time):
            raise FileNotFoundError
        return pack_record([], [], [], "", self._answered[rank])

    def cpu_seconds(self, pid):
        self._cpu[pid] += 0.0 if self._is_idle(pid, self.time) else 1.0
        return self._cpu[pid]

    def prober(self):
        return Prober(self, ProofRules(1e9), Logs([], Sanitize()), self.time, probes.Idleness(self.cpu_seconds))


class TestProber(unittest.TestCase):
    """Ranks that have issued nothing: only when they are asked matters."""

    def asked(self, is_idle, until, ranks=2, answers=lambda rank, time: True):
        """When which ranks are asked. `is_idle`: whether a rank is so at a time; `answers`: whether it does by then."""
        subject = Ranks(ranks, is_idle, answers)
        prober = subject.prober()
        while prober.due < until:
            subject.time = max(subject.time, prober.due)
            before = len(subject.found), prober.due
            self.assertIsNone(prober.step(subject.time, range(ranks), {}))
            self.assertNotEqual((len(subject.found), prober.due), before)
        return subject.found

    def test_watcher_looks_when_the_first_prober_is_due(self):
        self.assertEqual(FIRST_LOOK, Waiting.begin(Pace.first(0.0), 0.0).due)

    def test_idle_ranks_are_asked_after_a_second(self):
        found = self.asked(lambda rank, time: True, 10.0)
        self.assertAlmostEqual(found[0][0], probes.FIRST_PROBE, delta=0.01)
        self.assertEqual([ranks for _, ranks in found], [[0, 1]] * 4)

    def test_ranks_whose_server_is_busy(self):
        """It passes the request on when it has imported something; that is no reason to look at longer intervals."""
        found = self.asked(lambda rank, time: True, 12.0, answers=lambda rank, time: time > 8.0)
        self.assertEqual(len(found), 2)
        self.assertAlmostEqual(found[1][0], 8.0 + probes.FIRST_PROBE * probes.GROWTH, delta=probes.LONGEST_PAUSE + 0.01)

    def test_a_rank_that_does_not_answer(self):
        """It holds the GIL, or is stopped: nobody waits long for it."""
        all_answer = self.asked(lambda rank, time: True, 30.0)
        found = self.asked(lambda rank, time: True, 30.0, answers=lambda rank, time: rank == 0)
        self.assertGreater(len(found), 3)
        self.assertLess(found[1][0], all_answer[1][0] + probes.ANSWER_TIMEOUT + probes.LONGEST_PAUSE + 0.01)

    def test_ranks_that_never_answer(self):
        found = self.asked(lambda rank, time: True, 60.0, answers=lambda rank, time: False)
        self.assertGreater(len(found), 1)

    def test_ranks_that_compute_are_asked_seldom(self):
        found = self.asked(lambda rank, time: False, 10.0)
        self.assertAlmostEqual(found[0][0], probes.FACTOR_IF_BUSY * probes.FIRST_PROBE, delta=0.01)
        self.assertEqual([ranks for _, ranks in found], [[0, 1]] * 2)

    def test_ranks_that_have_just_become_idle(self):
        first, _ = self.asked(lambda rank, time: time > 1.6, 3.0)[0]
        self.assertLess(first, 2.3)
        self.assertGreater(first, 1.6)

    def test_ranks_that_become_idle_after_long(self):
        """As after the compiler: what they then wait for has nothing to do with the probes before."""
        for busy in ([0, 1], [0]):
            found = self.asked(lambda rank, time, busy=busy: time > 25.0 or rank not in busy, 40.0, ranks=3)
            first = next(time for time, ranks in found if time > 25.0 and ranks == [0, 1, 2])
            self.assertLess(first, 25.0 + probes.LOOK + probes.FIRST_PROBE + probes.IDLE_INTERVAL)

    def test_those_that_wait_while_one_computes(self):
        """A rank that computes is asked no more often than if all did."""
        found = self.asked(lambda rank, time: rank > 0, 40.0, ranks=3)
        self.assertEqual(found[0][1], [1, 2])
        self.assertAlmostEqual(found[0][0], probes.FIRST_PROBE, delta=0.01)
        self.assertGreater(len(found), 5)
        busy = self.asked(lambda rank, time: False, 40.0, ranks=3)
        asked = [time for time, ranks in found if 0 in ranks]
        self.assertLessEqual(len(asked), len(busy))
        self.assertAlmostEqual(asked[0], busy[0][0], delta=0.01)

    def test_one_that_waits_alone(self):
        """It has nobody to disagree with."""
        found = self.asked(lambda rank, time: rank == 1, 10.0, ranks=3)
        self.assertEqual([ranks for _, ranks in found], [[0, 1, 2]] * 2)

    def test_ranks_that_have_ended_before_the_confirmation(self):
        subject = Ranks(2, lambda rank, time: True, lambda rank, time: True)
        prober = subject.prober()
        prober._state = Confirming(Pace.first(0.0), probes.CONFIRMATION, (0,))
        self.assertIsNone(prober.step(prober.due, [1], {}))
        self.assertEqual(subject.found, [])
        self.assertGreater(prober.due, probes.CONFIRMATION)

    def test_on_demand(self):
        """The logs suggest that all wait: all are asked at once, also those that compute."""
        subject = Ranks(3, lambda rank, time: False, lambda rank, time: True)
        prober = subject.prober()
        prober.probe_now(0.5)
        self.assertEqual(prober.due, 0.5)
        prober.step(0.5, range(3), {})
        self.assertEqual([ranks for _, ranks in subject.found], [[0, 1, 2]])

    def test_news_put_a_probe_off_but_end_none(self):
        subject = Ranks(2, lambda rank, time: True, lambda rank, time: True)
        prober = subject.prober()
        prober.on_news(0.6)
        self.assertEqual(prober.due, 1.35)
        prober.probe_now(1.0)
        prober.step(1.0, range(2), {})
        asked_until = prober.due
        prober.on_news(1.01)
        prober.probe_now(1.01)
        self.assertEqual(prober.due, asked_until)


if __name__ == "__main__":
    run_tests()
