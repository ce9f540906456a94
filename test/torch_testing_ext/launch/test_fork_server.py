"""Tests the fork server: its start, its replacement when it dies, and that it leaves nothing behind."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.leftovers import nothing_left
from kit.outcomes import outcome_of
from kit.processes import wait_until_gone
from kit.ranks import FourRanks, local_class
from kit.settings import environ, timeout

from torch_testing_ext import launch
from torch_testing_ext._process import system
from torch_testing_ext._process.event_loop import wait_readable
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import fork_server, fork_server_client, start
from torch_testing_ext.launch.fork_server_messages import StartMethod


def fifo_of(test):
    """A path beside the test's folder, which a second attempt to start the ranks empties."""
    return f"{os.path.dirname(test.file_name)}.fifo"


collapsed = []  # what the fork server of TestMemory has collapsed; ranks inherit it


class Jobs(FourRanks):
    def finds_memory_collapsed(self):
        self.assertNotEqual(collapsed, [])

    def reduces(self):
        self.join_group()
        dist.all_reduce(torch.ones(1))

    def kills_its_server(self):
        self.join_group()
        dist.barrier()
        if self.rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    def stops_its_server(self):
        self.join_group()
        dist.barrier()
        if self.rank == 0:
            os.kill(os.getppid(), signal.SIGSTOP)
        signal.pause()

    def finds_no_store(self):
        self.assertFalse(os.path.exists(self.file_name))

    def starts_a_daemon(self):
        if self.rank == 0:
            child = subprocess.Popen(["sleep", "1004"], start_new_session=True)
            with open(fifo_of(self), "w") as ready:
                ready.write(f"{child.pid}\n")
        signal.pause()

    def sees_environment(self):
        self.assertEqual(os.environ.get("OF_THE_PARENT"), "yes")
        self.assertNotIn("GONE_FROM_THE_PARENT", os.environ)

    def sees_directory(self):
        self.assertEqual(os.getcwd(), Path(tempfile.gettempdir()).resolve().as_posix())


class OneJob(Jobs):
    """Each rank that is spawned imports torch."""

    world_size = 1


class ServerTest(TestCase):
    def setUp(self):
        super().setUp()
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    def test_killed_between_tests(self):
        server = start.launcher().server
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        seen = outcome_of(Jobs("reduces"))
        # Whether its death is noticed before the launch or by it, another server replaces it.
        self.assertEqual(seen.outcome, "passed", seen.message)
        self.assertNotEqual(start.launcher().server.pid, server.pid)

    @pytest.mark.slow
    def test_killed_during_a_test(self):
        pid = start.launcher().server.pid
        seen = outcome_of(Jobs("kills_its_server"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn(f"the process that starts the ranks (pid {pid}) was killed by SIGKILL", seen.message)
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    def test_ranks_die_with_their_server(self):
        case = Jobs("kills_its_server")
        case.setUp()
        pids = [process.pid for process in case.processes]
        with self.assertRaises(Exception):  # noqa: B017 - the test above checks which one
            case.kills_its_server()
        self.assertEqual(wait_until_gone(pids, 2), [])
        case.doCleanups()

    @pytest.mark.slow
    def test_environment_and_directory_are_those_of_the_launch(self):
        with environ(OF_THE_PARENT="yes"):
            self.assertEqual(outcome_of(Jobs("sees_environment")).outcome, "passed")
        self.assertEqual(outcome_of(Jobs("sees_environment")).outcome, "failed")
        before = os.getcwd()
        os.chdir(tempfile.gettempdir())
        try:
            self.assertEqual(outcome_of(Jobs("sees_directory")).outcome, "passed")
        finally:
            os.chdir(before)

    @pytest.mark.slow
    def test_classes_defined_after_the_fork(self):
        self.assertEqual(outcome_of(local_class()("passes")).outcome, "passed")
        self.assertEqual(outcome_of(local_class()("passes")).outcome, "passed")

    def test_closing_leaves_nothing(self):
        directory, pid = start.launcher().session_directory(), start.launcher().server.pid
        launch.close()
        self.assertFalse(directory.exists())
        self.assertEqual(wait_until_gone([pid], 2), [])
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    def test_each_thread_has_its_own(self):
        seen = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: seen.append(start.launcher()))
            thread.start()
            thread.join()
        self.assertEqual(len({*seen, start.launcher()}), 3)

    @pytest.mark.slow
    def test_a_forked_child_makes_its_own_server(self):
        """As a new interpreter: forked ranks would wait for OpenMP's threads, which the child lacks."""
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        pid = os.fork()
        if pid == 0:
            good = (
                outcome_of(Jobs("reduces")).outcome == "passed"
                and start.launcher().server.method is StartMethod.FORK_FRESH
            )
            launch.close()
            os._exit(0 if good else 1)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        with nothing_left(self):
            self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")


class RobustnessTest(TestCase):
    """Faults that must not affect the parent or the next test."""

    def setUp(self):
        super().setUp()
        launch.close()
        self.addCleanup(launch.close)
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    @pytest.mark.slow
    def test_a_launch_that_fails_half_way(self):
        """Not enough descriptors for 32 ranks: they are ended, and do not affect the next test."""
        soft, hard = resource.prlimit(start.launcher().server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(start.launcher().server.pid, resource.RLIMIT_NOFILE, (60, hard))
        with nothing_left(self):
            seen = outcome_of(Many("passes"))
            self.assertEqual(seen.outcome, "error")
            self.assertIn("ranks could not be started: OSError: [Errno 24]", seen.message)
            resource.prlimit(start.launcher().server.pid, resource.RLIMIT_NOFILE, (soft, hard))
            self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    @pytest.mark.slow
    def test_a_server_that_does_not_answer(self):
        with unittest.mock.patch.object(fork_server_client, "ANSWER_TIMEOUT", 0.5), timeout(1):
            seen = outcome_of(Jobs("stops_its_server"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("did not answer for", seen.message)
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    @pytest.mark.slow
    def test_a_second_attempt_finds_nothing_of_the_first(self):
        case = Jobs("finds_no_store")
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory, True)
        with unittest.mock.patch.object(launch, "new_directory", return_value=directory):
            (directory / "store").write_text("of the first attempt")
            os.kill(start.launcher().server.pid, signal.SIGKILL)
            os.waitid(os.P_PID, start.launcher().server.pid, os.WEXITED | os.WNOWAIT)
            seen = outcome_of(case)
        self.assertEqual(seen.outcome, "passed", seen.message)

    @pytest.mark.slow
    def test_it_holds_no_pipe_of_this_process_open(self):
        launch.close()
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")
        os.close(writing)
        self.assertTrue(wait_readable(reading, time.monotonic() + 5))

    def test_a_signal_arrives_once_and_only_at_the_rank(self):
        seen = outcome_of(Signalled("counts_signals"))
        self.assertEqual(seen.outcome, "passed", seen.message)

    @pytest.mark.slow
    def test_paths_that_are_not_strings(self):
        """Python ignores them in sys.path; a command with their repr could not be run."""
        sys.path.append(Path("/nowhere"))  # type: ignore[arg-type]
        self.addCleanup(sys.path.remove, Path("/nowhere"))
        with environ(TORCH_TESTING_EXT_START="spawn"):
            seen = outcome_of(OneJob("reduces"))
        self.assertEqual(seen.outcome, "passed", seen.message)

    def test_names_of_all_kinds(self):
        for name in ("test_é", "test_" + "長" * 100, "a/b\0c", "x" * 300):
            self.assertTrue(launch.new_directory(name).is_dir())

    def test_grandchildren_of_a_killed_run(self):
        """They are outside their rank's group, and not adopted yet when the server begins to end its ranks."""
        case = WithFifo("starts_a_daemon")
        case.setUp()
        self.addCleanup(case.doCleanups)
        with open(fifo_of(case)) as fifo:
            pid = int(fifo.readline())
        os.kill(start.launcher().server.pid, signal.SIGTERM)
        self.assertEqual(wait_until_gone([pid], 5), [])


class WithFifo(Jobs):
    def _spawn_processes(self):
        os.mkfifo(fifo_of(self))
        super()._spawn_processes()


class TestMemory(TestCase):
    """The memory of the fork server is collapsed before it forks many ranks, or after its second launch."""

    def setUp(self):
        super().setUp()
        launch.close()  # a new server inherits the patches
        self.addCleanup(launch.close)
        note = unittest.mock.patch.object(system, "collapse", lambda *region: collapsed.append(region))
        note.start()
        self.addCleanup(note.stop)

    def found(self):
        return outcome_of(Jobs("finds_memory_collapsed")).outcome

    def test_before_many_ranks(self):
        with unittest.mock.patch.object(fork_server, "MANY_RANKS", 4):
            self.assertEqual(self.found(), "passed")

    @pytest.mark.slow
    def test_after_the_second_launch(self):
        self.assertEqual(self.found(), "failed")
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")  # until it ends, the server is idle
        self.assertEqual(self.found(), "passed")


class Many(FourRanks):
    world_size = 32

    def passes(self):
        pass


class Signalled(FourRanks):
    world_size = 1

    def _spawn_processes(self):
        os.mkfifo(fifo_of(self))
        super()._spawn_processes()

    def setUp(self):
        super().setUp()
        with open(fifo_of(self)) as ready:
            ready.readline()
        self.processes[0].send_signal(signal.SIGRTMIN)

    def counts_signals(self):
        # A handler, since a mask would be that of this thread alone: another one of the rank could get the signal.
        received = []
        signal.signal(signal.SIGRTMIN, lambda *_: received.append("once"))
        child = subprocess.Popen(["sleep", "1003"])
        with open(fifo_of(self), "w") as ready:
            ready.write("ready\n")
        while not received:
            time.sleep(0.01)
        time.sleep(0.2)
        self.assertEqual(received, ["once"])
        self.assertIsNone(child.poll(), "the child was signalled too")
        child.kill()
        child.wait()


if __name__ == "__main__":
    run_tests()
