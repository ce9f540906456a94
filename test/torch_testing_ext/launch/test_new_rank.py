"""Tests signals that reach a new rank before it is ready for them: often, because the moment is random."""

import contextlib
import os
import signal

from kit.outcomes import outcome_of
from kit.ranks import FourRanks

from torch_testing_ext import launch
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import client

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

    def has_no_descriptors_of_others(self):
        """Has no descriptor of the server or of another rank. Descriptors that it opened itself do not count."""
        held = set(_descriptors(os.getpid()))
        alike = {name for name in held if name.startswith(("/dev/", "anon_inode:"))}  # the same name for all of a kind
        inherited = set(os.environ["INHERITED"].split("\n"))
        # The server may still have this rank's own files open while it starts the next rank.
        own = {name for name in held if f"rank{self.rank}." in name}
        self.assertEqual(held & set(_descriptors(os.getppid())) - inherited - alike - own, set())
        self.assertEqual([name for name in held if f"rank{1 - self.rank}." in name], [])


def _descriptors(pid):
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            yield os.readlink(f"/proc/{pid}/fd/{fd}")


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

    def test_sigterm_ends_the_rank_and_not_the_server(self):
        self.end(self.start())
        server = client.launcher().server.pid
        for _ in range(TIMES):
            test = self.start()
            for process in test.processes:
                process.terminate()
            codes = self.end(test)
            self.assertLessEqual(set(codes), {0, -signal.SIGTERM})
            self.assertEqual(client.launcher().server.pid, server, client.launcher().server.unusable)

    def test_asking_for_stacks_does_not_end_it(self):
        for _ in range(TIMES):
            test = self.start()
            test._launched.dump(0.0)
            self.assertEqual(self.end(test), [0, 0])

    def test_asking_one_that_computes_does_not_end_it(self):
        """faulthandler's own handler ends Python code that it interrupts once in a hundred or thousand times."""
        test = self.start("computes")
        for _ in range(4 * TIMES):
            test._launched.dump(600.0)
        self.assertEqual([process.exitcode for process in test.processes], [None, None])
        for process in test.processes:
            process.terminate()
        self.assertEqual(self.end(test), [-signal.SIGTERM, -signal.SIGTERM])

    def test_a_request_for_stacks_is_answered_however_early(self):
        test = self.start("waits")
        test._launched.dump(600.0)
        for rank in range(2):
            self.assertIn("most recent call first", test._launched.job.stacks(rank).read_text())
        for process in test.processes:
            process.terminate()
        self.assertEqual(self.end(test), [-signal.SIGTERM, -signal.SIGTERM])

    def test_it_uses_batch_scheduling(self):
        self.assertEqual(self.end(self.start("uses_batch_scheduling")), [0, 0])

    def test_it_has_no_descriptors_of_others(self):
        launch.close()  # the next server is forked from this process in its current state
        test = NewRank("has_no_descriptors_of_others")
        # The ranks inherit the descriptors of this process (a runner's capture, for example).
        os.environ["INHERITED"] = "\n".join(_descriptors(os.getpid()))
        self.addCleanup(os.environ.pop, "INHERITED")
        seen = outcome_of(test)
        self.assertEqual(seen.outcome, "passed", seen.message)


if __name__ == "__main__":
    run_tests()
