"""Signals that meet a rank before it is ready for them. Which moment they meet is chance: hence many times."""

import contextlib
import os
import signal

from launch_support import Ranks, outcome_of

from torch_testing_ext import launch
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import client, now

TIMES = 40


class Newborn(Ranks):
    world_size = 2

    def passes(self):
        pass

    def gives_way(self):
        self.assertEqual(os.sched_getscheduler(0), os.SCHED_BATCH)

    def holds(self):
        """Nothing that belongs to the server or to another rank. What it made itself is its own affair."""
        held = set(_descriptors(os.getpid()))
        alike = {name for name in held if name.startswith(("/dev/", "anon_inode:"))}  # the same name for all of a kind
        inherited = set(os.environ["INHERITED"].split("\n"))
        # The server may still hold this rank's own files, while it starts the next.
        own = {name for name in held if f"rank{self.rank}." in name}
        self.assertEqual(held & set(_descriptors(os.getppid())) - inherited - alike - own, set())
        self.assertEqual([name for name in held if f"rank{1 - self.rank}." in name], [])


def _descriptors(pid):
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself is gone
            yield os.readlink(f"/proc/{pid}/fd/{fd}")


class TestNewborn(TestCase):
    def start(self, name="passes"):
        test = Newborn(name)
        test.setUp()
        self.addCleanup(test.doCleanups)
        return test

    def end(self, test):
        """Wait for all ranks; their exit codes."""
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

    def test_asking_where_it_is_does_not_end_it(self):
        for _ in range(TIMES):
            test = self.start()
            test._launched.dump(0.0)
            self.assertEqual(self.end(test), [0, 0])

    def test_asking_in_time_is_answered_however_young_it_is(self):
        test = self.start()
        began = now()
        test._launched.dump(60.0)
        self.assertLess(now() - began, 30.0)
        self.assertEqual(self.end(test), [0, 0])

    def test_it_gives_way_to_others_that_it_wakes(self):
        self.assertEqual(self.end(self.start("gives_way")), [0, 0])

    def test_it_holds_nothing_of_others(self):
        launch.close()  # the server is to descend from this process as it is now, not as it was long ago
        test = Newborn("holds")
        # What this process holds (a runner's capture, say) the ranks hold too: they descend from it by forks alone.
        os.environ["INHERITED"] = "\n".join(_descriptors(os.getpid()))
        self.addCleanup(os.environ.pop, "INHERITED")
        seen = outcome_of(test)
        self.assertEqual(seen.outcome, "passed", seen.message)


if __name__ == "__main__":
    run_tests()
