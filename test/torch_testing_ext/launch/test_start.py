"""Tests how the fork server starts: forked from this process, or as a new interpreter; and its output."""

import _thread
import contextlib
import ctypes
import errno
import io
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.files import subject, write
from kit.leftovers import nothing_left
from kit.outcomes import outcome_of
from kit.processes import start_python
from kit.ranks import FourRanks, local_class
from kit.settings import environ

from torch_testing_ext import launch
from torch_testing_ext._process import fork_safety, system
from torch_testing_ext._tests import system_refusals
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import in_rank, start
from torch_testing_ext.launch.fork_server_messages import StartMethod


class Reduces(FourRanks):
    def reduces(self):
        self.join_group()
        dist.all_reduce(torch.ones(1))


class TwoReduce(Reduces):
    """Each rank that is spawned imports torch."""

    world_size = 2


INTERRUPTS = """
import os, signal
from pathlib import Path

Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
os.kill(os.getppid(), signal.SIGUSR1)
"""


class StartTest(TestCase):
    """The start method that is chosen."""

    def setUp(self):
        super().setUp()
        launch.close()
        self.addCleanup(launch.close)

    def test_a_class_that_no_other_interpreter_has(self):
        with environ(TORCH_TESTING_EXT_START="spawn"):
            seen = outcome_of(local_class()("passes"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("is defined inside a function, so its ranks must be forked from this process", seen.message)
        self.assertIsNone(start.launcher().server)  # the next test makes a server of its own

    @pytest.mark.slow
    def test_changing_the_start_method_changes_the_server(self):
        with nothing_left(self):
            with environ(TORCH_TESTING_EXT_START="fork"):
                self.assertEqual(outcome_of(Reduces("reduces")).outcome, "passed")
                self.assertIs(start.launcher().server.method, StartMethod.FORK)
            with environ(TORCH_TESTING_EXT_START="spawn"):
                self.assertEqual(outcome_of(TwoReduce("reduces")).outcome, "passed")
                self.assertIs(start.launcher().server.method, StartMethod.SPAWN)
            self.assertEqual(outcome_of(Reduces("reduces")).outcome, "passed")
            self.assertIs(start.launcher().server.method, StartMethod.FORK)
            launch.close()

    @pytest.mark.slow
    def test_a_process_that_used_an_accelerator_and_has_made_groups(self):
        launcher = start.Launcher()
        self.addCleanup(launcher.close)
        launcher._in_use = True  # as found earlier
        named = launch.Named.of(start.close)  # of a module that any interpreter can import
        with mock.patch("torch_testing_ext._torch.groups.process_groups.made_groups_before", lambda: True):
            server = launcher._make_server("auto", named)
        self.addCleanup(server.close)
        self.assertIs(server.method, StartMethod.FORK_FRESH)

    @pytest.mark.slow
    def test_ctrl_c_while_the_server_starts(self):
        def interrupt(number, frame):
            raise KeyboardInterrupt

        self.addCleanup(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, interrupt))
        with tempfile.TemporaryDirectory() as folder:
            file = write(Path(folder), "subject.py", INTERRUPTS)
            subject = launch.Named("subject", "T", str(file), -1)
            with self.assertRaises(KeyboardInterrupt):
                start.launcher().try_method(StartMethod.FORK_FRESH, subject)
            pid = file.with_suffix(".pid").read_text()
            self.assertFalse(Path("/proc", pid).exists(), "the server has not been ended and reaped")

    @pytest.mark.slow
    def test_another_thread_requires_a_new_interpreter(self):
        import threading

        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, name="of the test")
        thread.start()
        try:
            self.assertEqual(outcome_of(Reduces("reduces")).outcome, "passed")
            self.assertIs(start.launcher().server.method, StartMethod.FORK_FRESH)
        finally:
            stop.set()
            thread.join()

    def test_earlier_parallel_regions_do_not_prevent_a_fork(self):
        """OpenMP's idle threads are ended before the fork; otherwise the ranks' matmul would hang."""
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        self.assertEqual(outcome_of(Multiplies("multiplies")).outcome, "passed")
        self.assertIs(start.launcher().server.method, StartMethod.FORK)

    def test_threads_that_torch_restarts_in_a_child(self):
        before = torch.get_num_threads()
        launch.close()
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        torch.set_num_threads(3)
        self.addCleanup(torch.set_num_threads, before)
        self.assertEqual(outcome_of(Multiplies("multiplies")).outcome, "passed")
        self.assertIs(start.launcher().server.method, StartMethod.FORK)

    def test_ranks_have_torchs_threads_from_the_start(self):
        """Or several threads of theirs might start them at once, and abort. One rank has as many as this process."""
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(system.cores())
        seen = outcome_of(Alone("has_threads"))
        self.assertEqual(seen.outcome, "passed", seen.message)
        self.assertIs(start.launcher().server.method, StartMethod.FORK)


class KilledTest(TestCase):
    """A process that is killed leaves no folder, whatever it was doing."""

    def left_by(self, *lines):
        """Return what a process leaves in its temporary folder. A new interpreter: it has a launcher of its own."""
        with tempfile.TemporaryDirectory() as folder:
            file = write(Path(folder), "killed.py", "\n".join([KILLED, *(f"    {line}" for line in lines)]))
            temporary = Path(folder, "temporary")
            temporary.mkdir()
            process = start_python(str(file), cwd=Path(folder), TMPDIR=str(temporary))
            # Whatever it has started has ended, too: it has the same output.
            output, _ = process.communicate()
            self.assertEqual(process.returncode, -signal.SIGKILL, output)
            return os.listdir(temporary)

    def test_between_ranks(self):
        self.assertEqual(self.left_by("launch.discard(launch.new_directory('x'))", "kill(os.getpid())"), [])

    def test_with_files_and_no_fork_server(self):
        self.assertEqual(self.left_by("launch.keep_directory()", "launch.new_directory('x')", "kill(os.getpid())"), [])

    @pytest.mark.slow
    def test_while_ranks_that_inherit_nothing_run(self):
        self.assertEqual(self.left_by(SPAWNS, "spawn(kills, 1)"), [])

    @pytest.mark.slow
    def test_after_such_ranks(self):
        folder = "launch.discard(launch.new_directory('x'))"
        self.assertEqual(self.left_by(SPAWNS, "spawn(abs, 1)", "launch.close()", folder, "kill(os.getpid())"), [])


SPAWNS = "from torch_testing_ext.ranks import spawn"
KILLED = """
import os, signal
from torch_testing_ext import launch

def kill(pid):
    os.kill(pid, signal.SIGKILL)

def kills(rank):
    kill(int(os.environ["PARENT"]))
    signal.pause()

if __name__ == "__main__":
    os.environ.update(PARENT=str(os.getpid()), TORCH_TESTING_EXT_START="spawn")
"""


class Alone(FourRanks):
    world_size = 1

    def has_threads(self):
        before = system.threads()
        torch.set_num_threads(torch.get_num_threads())
        self.assertEqual(system.threads(), before)


class Multiplies(FourRanks):
    world_size = 2

    def multiplies(self):
        torch.set_num_threads(4)
        product = torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        self.assertEqual(product[0, 0].item(), 512)


class Prints(Alone):
    def leaves_text_in_buffers(self):
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 0, 8192)
        libc.printf(b"said by C\n")
        sys.stdout.write("begun")
        sys.stdout = io.StringIO()
        self.fail("as asked")


class OutputTest(TestCase):
    def test_all_that_a_rank_has_printed_is_told(self):
        message = outcome_of(Prints("leaves_text_in_buffers")).message
        self.assertIn("\nsaid by C\n", message)
        self.assertIn("\nbegun", message)

    @pytest.mark.slow
    def test_output_of_the_parent_is_not_written_twice(self):
        """Text in the parent's buffers at the fork is written only by the parent."""
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory), "test_it.py", BUFFERED)
            main = start_python("test_it.py", cwd=Path(directory))
            printed, _ = main.communicate(timeout=60)
        self.assertEqual(printed.count("only once"), 1, printed)

    def test_a_normal_start_prints_nothing(self):
        launch.close()
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            outcome_of(Reduces("reduces"))
        self.assertEqual(stderr.getvalue(), "")


BUFFERED = subject(__file__, "buffered_output.py")


class NoThreads:
    """The module _thread in a process that may start no more threads."""

    def __getattr__(self, name):
        return getattr(_thread, name)

    def start_new_thread(self, *arguments):
        raise RuntimeError("can't start new thread")


class RefusedTest(TestCase):
    """The system refuses something: the message has what to do, and no traceback of ours."""

    def setUp(self):
        super().setUp()
        launch.close()
        self.addCleanup(launch.close)

    def test_a_system_that_cannot_fork(self):
        with mock.patch.object(system, "CAN_FORK", False):
            job = Reduces("reduces")
            with self.assertRaisesRegex(launch.CannotStart, "^these ranks are forks of this process, which needs"):
                launch.launch_from_here(job)

    def test_no_folder_for_files(self):
        with environ(TORCH_TESTING_EXT_LOGS="/proc/nothing"):
            seen = outcome_of(Reduces("reduces"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("Set TORCH_TESTING_EXT_LOGS to a folder that can be written to", seen.message)
        with (
            environ(TORCH_TESTING_EXT_LOGS=""),
            mock.patch.object(tempfile, "tempdir", "/proc/nothing"),
            self.assertRaisesRegex(launch.CannotStart, "Set TMPDIR to a folder that can be written to"),
        ):
            start.Launcher().session_directory()

    def test_no_temporary_folder_at_all(self):
        """As with `ulimit -f 0`: Python writes a file to find one."""
        with (
            environ(TORCH_TESTING_EXT_LOGS=""),
            mock.patch.object(tempfile, "tempdir", None),
            mock.patch.object(tempfile, "_candidate_tempdir_list", return_value=["/proc/nothing"]),
            self.assertRaisesRegex(launch.CannotStart, "No usable temporary directory.* Set TMPDIR to a folder that"),
        ):
            start.Launcher().session_directory()

    def test_a_umask_that_closes_new_files(self):
        refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/tmp/x")
        before = os.umask(0o777)
        try:
            self.assertRegex(system_refusals.why_refused(refused), "The umask is 777, .*set it to 022")
        finally:
            os.umask(before)
        self.assertNotIn("umask", system_refusals.why_refused(refused))

    def test_below_setups_of_a_test_file_there_is_no_frame_of_ours(self):
        with environ(TORCH_TESTING_EXT_LOGS="/proc/nothing"):
            seen = outcome_of(SetsUp("reduces"))
        (ours,) = re.findall('File ".*/torch_testing_ext/_testing/bases/(?!kit/)(.*)", line', seen.message)
        self.assertEqual(ours, "rank_verdicts.py", seen.message)
        self.assertNotIn("/start.py", seen.message)

    def test_a_full_disk(self):
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with (
            mock.patch.object(start.tempfile, "mkdtemp", side_effect=error),
            self.assertRaisesRegex(launch.CannotStart, "No space left.*Free disk space, or set TMPDIR"),
        ):
            start.Launcher().session_directory()

    def test_no_more_processes(self):
        error = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        with mock.patch.object(fork_safety, "fork", side_effect=error), nothing_left(self):
            seen = outcome_of(Reduces("reduces"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("The limit of processes and threads is reached: raise it (ulimit -u", seen.message)

    def test_no_more_threads(self):
        with mock.patch.object(in_rank, "_thread", NoThreads()):
            seen = outcome_of(Reduces("reduces"))
        self.assertIn("all 4 ranks raised before the test: RuntimeError: can't start new thread", seen.message)
        self.assertNotIn("in_rank.py", seen.message)
        self.assertIn("ulimit -u", seen.message)

    def test_the_working_folder_was_deleted(self):
        self.addCleanup(os.chdir, os.getcwd())
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        os.rmdir(folder)
        self.assertEqual(outcome_of(Reduces("reduces")).outcome, "passed")


class SetsUp(Reduces):
    def setUp(self):
        super().setUp()


if __name__ == "__main__":
    run_tests()
