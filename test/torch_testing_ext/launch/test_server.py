"""The process that starts the ranks: how it comes to be, that it is not missed when it dies, that it leaves nothing."""

import contextlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import torch
import torch.distributed as dist
from launch_support import Ranks, environ, nothing_left, outcome_of, python, timeout, wait_until_gone, write

from torch_testing_ext import launch
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import client
from torch_testing_ext.launch.server import Kind


class Jobs(Ranks):
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
            fifo = os.path.join(os.path.dirname(self.file_name), "daemon")
            with open(fifo, "w") as ready:
                ready.write(f"{child.pid}\n")
        signal.pause()

    def sees_environment(self):
        self.assertEqual(os.environ.get("OF_THE_PARENT"), "yes")
        self.assertNotIn("GONE_FROM_THE_PARENT", os.environ)

    def sees_directory(self):
        self.assertEqual(os.getcwd(), Path(tempfile.gettempdir()).resolve().as_posix())


def make_class():
    class Local(Ranks):
        def passes(self):
            pass

    return Local


class ServerTest(TestCase):
    def setUp(self):
        super().setUp()
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    def test_killed_between_tests(self):
        server = client._server
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        seen = outcome_of(Jobs("reduces"))
        # Whether it is found dead before or by the launch, another one takes its place.
        self.assertEqual(seen.outcome, "passed", seen.message)
        self.assertNotEqual(client._server.pid, server.pid)

    def test_killed_during_a_test(self):
        pid = client._server.pid
        seen = outcome_of(Jobs("kills_its_server"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn(f"the process that starts the ranks (pid {pid}) was killed by SIGKILL", seen.message)
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    def test_ranks_die_with_their_server(self):
        case = Jobs("kills_its_server")
        case.setUp()
        pids = [process.pid for process in case.processes]
        with self.assertRaises(Exception):  # noqa: B017 - which one is the other test's concern
            case.kills_its_server()
        self.assertEqual(wait_until_gone(pids, 2), [])
        case.doCleanups()

    def test_environment_and_directory_are_those_of_the_moment(self):
        with environ(OF_THE_PARENT="yes"):
            self.assertEqual(outcome_of(Jobs("sees_environment")).outcome, "passed")
        self.assertEqual(outcome_of(Jobs("sees_environment")).outcome, "failed")
        before = os.getcwd()
        os.chdir(tempfile.gettempdir())
        try:
            self.assertEqual(outcome_of(Jobs("sees_directory")).outcome, "passed")
        finally:
            os.chdir(before)

    def test_classes_that_came_later(self):
        self.assertEqual(outcome_of(make_class()("passes")).outcome, "passed")
        self.assertEqual(outcome_of(make_class()("passes")).outcome, "passed")

    def test_closing_leaves_nothing(self):
        directory, pid = client.session_directory(), client._server.pid
        launch.close()
        self.assertFalse(directory.exists())
        self.assertEqual(wait_until_gone([pid], 2), [])
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    def test_a_forked_child_of_ours_makes_its_own(self):
        """From a new interpreter: OpenMP's threads, which this process has and the child lacks, would be waited for."""
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        pid = os.fork()
        if pid == 0:
            good = outcome_of(Jobs("reduces")).outcome == "passed" and client._server.kind is Kind.FRESH
            launch.close()
            os._exit(0 if good else 1)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        with nothing_left(self):
            self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")


class RoughTest(TestCase):
    """What must not take the parent or the next test along."""

    def setUp(self):
        super().setUp()
        launch.close()
        self.addCleanup(launch.close)
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    def test_a_launch_that_fails_half_way(self):
        """Not enough descriptors for 32 ranks: they are ended, and the next test hears nothing of them."""
        soft, hard = resource.prlimit(client._server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(client._server.pid, resource.RLIMIT_NOFILE, (60, hard))
        with nothing_left(self):
            seen = outcome_of(Many("passes"))
            self.assertEqual(seen.outcome, "error")
            self.assertIn("ranks could not be started: OSError: [Errno 24]", seen.message)
            resource.prlimit(client._server.pid, resource.RLIMIT_NOFILE, (soft, hard))
            self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    def test_a_server_that_does_not_answer(self):
        with unittest.mock.patch.object(client, "_ANSWER_PATIENCE", 0.5), timeout(1):
            seen = outcome_of(Jobs("stops_its_server"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("did not answer for", seen.message)
        self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")

    def test_a_second_attempt_finds_nothing_of_the_first(self):
        case = Jobs("finds_no_store")
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory, True)
        with unittest.mock.patch.object(launch, "new_directory", return_value=directory):
            (directory / "store").write_text("of the first attempt")
            os.kill(client._server.pid, signal.SIGKILL)
            os.waitid(os.P_PID, client._server.pid, os.WEXITED | os.WNOWAIT)
            seen = outcome_of(case)
        self.assertEqual(seen.outcome, "passed", seen.message)

    def test_a_signal_arrives_once_and_at_the_rank_alone(self):
        self.assertEqual(outcome_of(Signalled("counts_signals")).outcome, "passed")

    def test_paths_that_are_no_text(self):
        """Python skips them in sys.path; a command with their repr could not be run."""
        sys.path.append(Path("/nowhere"))  # type: ignore[arg-type]
        self.addCleanup(sys.path.remove, Path("/nowhere"))
        with environ(TORCH_TESTING_EXT_START="spawn"):
            seen = outcome_of(Jobs("reduces"))
        self.assertEqual(seen.outcome, "passed", seen.message)

    def test_names_of_all_kinds(self):
        for name in ("test_é", "test_" + "長" * 100, "a/b\0c", "x" * 300):
            self.assertTrue(launch.new_directory(name).is_dir())

    def test_threads_that_torch_starts_anew_in_a_child(self):
        before = torch.get_num_threads()
        launch.close()
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        torch.set_num_threads(3)
        self.addCleanup(torch.set_num_threads, before)
        self.assertEqual(outcome_of(Multiplies("multiplies")).outcome, "passed")
        self.assertIs(client._server.kind, Kind.TWIN)

    def test_grandchildren_of_a_killed_run(self):
        """Out of their rank's group, and not yet ours when the server begins to end."""
        case = WithFifo("starts_a_daemon")
        case.setUp()
        self.addCleanup(case.doCleanups)
        with open(os.path.join(os.path.dirname(case.file_name), "daemon")) as fifo:
            pid = int(fifo.readline())
        os.kill(client._server.pid, signal.SIGTERM)
        self.assertEqual(wait_until_gone([pid], 5), [])


class WithFifo(Jobs):
    def _spawn_processes(self):
        os.mkfifo(os.path.join(os.path.dirname(self.file_name), "daemon"))
        super()._spawn_processes()


class Many(Ranks):
    world_size = 32

    def passes(self):
        pass


class Signalled(Ranks):
    world_size = 1

    def _spawn_processes(self):
        os.mkfifo(self.file_name)
        super()._spawn_processes()

    def setUp(self):
        super().setUp()
        with open(self.file_name) as ready:
            ready.readline()
        self.processes[0].send_signal(signal.SIGRTMIN)

    def counts_signals(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
        child = subprocess.Popen(["sleep", "1003"])
        with open(self.file_name, "w") as ready:
            ready.write("ready\n")
        signal.sigwait([signal.SIGRTMIN])
        self.assertIsNone(signal.sigtimedwait([signal.SIGRTMIN], 0.2), "it came twice")
        self.assertIsNone(child.poll(), "the child was signalled too")
        child.kill()
        child.wait()


class StartTest(TestCase):
    """Which kind of server is made."""

    def setUp(self):
        super().setUp()
        launch.close()
        self.addCleanup(launch.close)

    def test_spawned_ranks(self):
        with environ(TORCH_TESTING_EXT_START="spawn"), nothing_left(self):
            self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")
            self.assertIs(client._server.kind, Kind.BARE)
            launch.close()

    def test_a_class_that_no_other_interpreter_has(self):
        with environ(TORCH_TESTING_EXT_START="spawn"):
            seen = outcome_of(make_class()("passes"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("is made in a function: only ranks forked off this process have it", seen.message)
        self.assertIsNone(client._server)  # the next test starts as well as it can

    def test_changing_the_way_changes_the_server(self):
        with environ(TORCH_TESTING_EXT_START="fork"):
            self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")
            self.assertIs(client._server.kind, Kind.TWIN)
        with environ(TORCH_TESTING_EXT_START="spawn"):
            self.assertEqual(outcome_of(Jobs("sees_environment")).outcome, "failed")
            self.assertIs(client._server.kind, Kind.BARE)

    def test_another_thread_makes_a_new_interpreter_necessary(self):
        import threading

        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, name="of the test")
        thread.start()
        try:
            self.assertEqual(outcome_of(Jobs("reduces")).outcome, "passed")
            self.assertIs(client._server.kind, Kind.FRESH)
        finally:
            stop.set()
            thread.join()

    def test_parallel_regions_before_are_no_obstacle(self):
        """OpenMP's idle threads are ended before the fork; without that the ranks' matmul would hang."""
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        self.assertEqual(outcome_of(Multiplies("multiplies")).outcome, "passed")
        self.assertIs(client._server.kind, Kind.TWIN)


class Multiplies(Ranks):
    world_size = 2

    def multiplies(self):
        torch.set_num_threads(4)
        product = torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        self.assertEqual(product[0, 0].item(), 512)


TEST_FILE = """
    import os, signal, sys, unittest
    import torch.distributed as dist
    from torch_testing_ext.common_distributed import MultiProcessTestCase
    from torch_testing_ext.common_utils import run_tests

    class TestIt(MultiProcessTestCase):
        world_size = 2

        def setUp(self):
            super().setUp()
            self._spawn_processes()

        def test_a_first(self):
            pass

        def test_waits(self):
            store = dist.FileStore(self.file_name, 2)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
            dist.barrier()
            if self.rank == 0:
                # One write: the reader waits for this line.
                os.write({fd}, b"ready %d %d\\n" % (os.getppid(), os.getpid()))
            signal.pause()

        def test_z_last(self):
            pass

    if __name__ == "__main__":
        run_tests()
    """


class EndTest(TestCase):
    """The main process ends before its time."""

    def start(self):
        """A test file whose test waits for ever; returns when it does, with the pids of its server and a rank."""
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        write(directory, "test_it.py", TEST_FILE.replace("{fd}", str(writing)))
        temp = directory / "tmp"
        temp.mkdir()
        os.set_inheritable(writing, True)
        from launch_support import PACKAGE_PARENT

        main = subprocess.Popen(
            [sys.executable, "test_it.py"],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": PACKAGE_PARENT, "TMPDIR": str(temp)},
            pass_fds=[writing],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.close(writing)
        with os.fdopen(os.dup(reading)) as line:
            words = line.readline().split()
        self.assertEqual(words[:1], ["ready"], main.stdout.read() if not words else "")
        self.addCleanup(main.stdout.close)
        return main, temp, [int(word) for word in words[1:]]

    def test_killed(self):
        main, temp, pids = self.start()
        main.kill()
        main.wait()
        self.assertEqual(wait_until_gone(pids, 2), [])
        self.assertEqual([file.name for file in temp.iterdir() if file.name.startswith("torch_testing_ext")], [])

    def test_interrupted(self):
        main, temp, pids = self.start()
        main.send_signal(signal.SIGINT)
        printed, _ = main.communicate(timeout=30)
        self.assertEqual(wait_until_gone(pids, 2), [])
        self.assertIn("TestIt.test_waits was interrupted", printed)
        self.assertIn("Ran 2 tests", printed)  # the summary; the third was not begun
        self.assertEqual(main.returncode, 130, printed)
        self.assertEqual([file.name for file in temp.iterdir() if file.name.startswith("torch_testing_ext")], [])

    def test_terminated(self):
        main, temp, pids = self.start()
        main.terminate()
        main.wait()
        self.assertEqual(wait_until_gone(pids, 2), [])
        self.assertEqual([file.name for file in temp.iterdir() if file.name.startswith("torch_testing_ext")], [])


class DirectoryTest(TestCase):
    """No room for what ranks have to leave."""

    def setUp(self):
        super().setUp()
        launch.close()
        self.addCleanup(launch.close)

    def test_temporary_directory_not_there(self):
        with unittest.mock.patch.object(tempfile, "tempdir", "/proc/self/no/such/directory"):
            seen = outcome_of(Jobs("reduces"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("no directory for the logs and results of ranks can be made", seen.message)
        self.assertIn("set TMPDIR", seen.message)

    @unittest.skipUnless(hasattr(os, "geteuid") and os.geteuid() == 0, "mounting a small file system needs root")
    def test_temporary_directory_full(self):
        """In a mount namespace of its own, on a file system of 64 kB that the test file fills up itself."""
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory), "test_full.py", FULL_DISK)
            small = Path(directory) / "small"
            small.mkdir()
            mount = f"mount -t tmpfs -o size=64k none {small} && TMPDIR={small} exec {sys.executable} test_full.py"
            main = _unshared(mount, Path(directory))
        if "unshare" in main and "ermitted" in main:
            self.skipTest("mount namespaces are not permitted here")
        self.assertIn("ranks could not be started: OSError: [Errno 28] No space left on device", main)
        self.assertIn("filled it up and still could say so", main)
        self.assertIn("Ran 2 tests", main)


def _unshared(command: str, directory: Path) -> str:
    from launch_support import PACKAGE_PARENT

    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": PACKAGE_PARENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


FULL_DISK = """
    import contextlib, os, tempfile, unittest
    from torch_testing_ext.common_distributed import MultiProcessTestCase
    from torch_testing_ext.common_utils import run_tests

    def fill():
        with open(os.path.join(tempfile.gettempdir(), "filler"), "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 512)
            except OSError:
                pass

    def empty():
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(tempfile.gettempdir(), "filler"))

    class TestFull(MultiProcessTestCase):
        world_size = 2

        def setUp(self):
            super().setUp()
            self.addCleanup(empty)
            if "before" in self._testMethodName:
                fill()
            self._spawn_processes()

        def test_full_before(self):
            pass

        def test_full_meanwhile(self):
            if self.rank == 1:
                fill()
                raise ValueError("filled it up and still could say so " + "x" * 30000)

    if __name__ == "__main__":
        run_tests()
    """


class ConcurrencyTest(TestCase):
    def test_output_of_the_parent_is_not_written_twice(self):
        """What is in the parent's buffers when it is forked stays the parent's."""
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory), "test_it.py", BUFFERED)
            main = python("test_it.py", cwd=Path(directory))
            printed, _ = main.communicate(timeout=60)
        self.assertEqual(printed.count("only once"), 1, printed)

    def test_nothing_is_said_of_what_does_not_matter(self):
        launch.close()
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            outcome_of(Jobs("reduces"))
        self.assertEqual(said.getvalue(), "")


BUFFERED = """
    import sys
    from torch_testing_ext.common_distributed import MultiProcessTestCase
    from torch_testing_ext.common_utils import run_tests

    class TestIt(MultiProcessTestCase):
        world_size = 2

        def setUp(self):
            super().setUp()
            sys.stdout.write("only once ")  # no newline, no flush
            self._spawn_processes()

        def test_it(self):
            pass

    if __name__ == "__main__":
        run_tests()
    """


if __name__ == "__main__":
    run_tests()
