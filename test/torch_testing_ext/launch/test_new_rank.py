"""Tests signals that reach a new rank before it is ready for them: often, because the moment is random."""

import contextlib
import os
import signal
from unittest import mock

import pytest
from kit.ranks import FourRanks

from torch_testing_ext import launch
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import start

TIMES = 40


def length(number):
    return len(str(number))


class NewRank(FourRanks):
    world_size = 2

    def passes(self):
        pass

    def waits(self):
        while True:
            signal.pause()

    def computes(self):
        while True:
            sum(map(length, range(100)))

    def uses_batch_scheduling(self):
        self.assertEqual(os.sched_getscheduler(0), os.SCHED_BATCH)


def _descriptors(pid):
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            yield os.readlink(f"/proc/{pid}/fd/{fd}")


def _named(descriptors):
    return {name for name in descriptors if not name.startswith(("/dev/", "anon_inode:"))}  # one name for all of a kind


class TestNewRank(TestCase):
    def start(self, name="passes"):
        test = NewRank(name)
        test.setUp()
        self.addCleanup(test.doCleanups)
        return test

    def end(self, test):
        """Wait for all ranks. Returns their exit codes."""
        for process in test.processes:
            process.join(timeout=60)
        codes = [process.exitcode for process in test.processes]
        test.doCleanups()
        return codes

    def terminate(self, test):
        for process in test.processes:
            process.terminate()
        return self.end(test)

    @pytest.mark.slow
    def test_sigterm_ends_the_rank_and_not_the_server(self):
        self.end(self.start())
        server = start.launcher().server.pid
        for _ in range(TIMES):
            test = self.start()
            self.assertLessEqual(set(self.terminate(test)), {0, -signal.SIGTERM})
            self.assertEqual(start.launcher().server.pid, server, start.launcher().server.unusable)

    @pytest.mark.slow
    def test_asking_for_stacks_does_not_end_it(self):
        for _ in range(TIMES):
            test = self.start()
            test._session.host.run.dump(0.0)
            self.assertEqual(self.end(test), [0, 0])

    @pytest.mark.slow
    def test_asking_one_that_computes_does_not_end_it(self):
        """faulthandler's own handler ends Python code that it interrupts once in a hundred or thousand times."""
        test = self.start("computes")
        for _ in range(4 * TIMES):
            test._session.host.run.dump(600.0)
        self.assertEqual([process.exitcode for process in test.processes], [None, None])
        self.assertEqual(self.terminate(test), [-signal.SIGTERM, -signal.SIGTERM])

    def test_a_request_for_stacks_is_answered_however_early(self):
        test = self.start("waits")
        test._session.host.run.dump(600.0)
        for rank in range(2):
            self.assertIn("most recent call first", test._session.host.run.job.stacks(rank).read_text())
        self.assertEqual(self.terminate(test), [-signal.SIGTERM, -signal.SIGTERM])

    def test_it_uses_batch_scheduling(self):
        self.assertEqual(self.end(self.start("uses_batch_scheduling")), [0, 0])

    @mock.patch.dict(os.environ, TORCH_TESTING_EXT_STREAM="1")  # the server has a pipe and a log more for each rank
    def test_it_has_no_descriptors_of_others(self):
        """Descriptors that a rank opened itself, or got from this process, do not count."""
        launch.close()  # the next server is forked from this process in its current state
        ours = set(_descriptors(os.getpid()))
        test = self.start("waits")  # from now on the server holds only its own ends of what it gave to the ranks
        test._session.host.run.dump(600.0)  # a rank that answers has closed what it inherited
        of_ranks = [set(_descriptors(process.pid)) - ours for process in test.processes]
        of_server = set(_descriptors(start.launcher().server.pid))
        # The two ends of a pipe have the same name: the server reads what a rank prints.
        pipes = [os.readlink(f"/proc/{process.pid}/fd/1") for process in test.processes]
        self.assertEqual([_named(held & of_server) for held in of_ranks], [{pipe} for pipe in pipes])
        self.assertEqual(_named(of_ranks[0] & of_ranks[1]), set())
        self.assertEqual(self.terminate(test), [-signal.SIGTERM, -signal.SIGTERM])


if __name__ == "__main__":
    run_tests()
