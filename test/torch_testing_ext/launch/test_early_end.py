"""Tests what happens if the main process ends early, or has no disk space for the files of ranks."""

import os
import signal
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import pytest
from kit.files import subject, write
from kit.outcomes import outcome_of
from kit.processes import ROOT, clean_environ, heed_ctrl_c, wait_until_gone
from kit.ranks import FourRanks

from torch_testing_ext import launch
from torch_testing_ext.common_utils import TestCase, run_tests

TEST_FILE = subject(__file__, "waiting_ranks.py")


def setUpModule():
    heed_ctrl_c()


class EndTest(TestCase):
    """The main process ends early."""

    def start(self):
        """Start a test file whose test never ends. Returns when it waits, with the pids of its server and a rank."""
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        write(directory, "test_it.py", TEST_FILE.replace("READY = 1", f"READY = {writing}"))
        temp = directory / "tmp"
        temp.mkdir()
        os.set_inheritable(writing, True)
        main = subprocess.Popen(
            [sys.executable, "test_it.py"],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temp)},
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

    @pytest.mark.slow
    def test_interrupted(self):
        main, temp, pids = self.start()
        main.send_signal(signal.SIGINT)
        printed, _ = main.communicate(timeout=30)
        self.assertEqual(wait_until_gone(pids, 2), [])
        self.assertIn("TestIt.test_waits was interrupted", printed)
        self.assertIn("Ran 2 tests", printed)  # the summary; the third test did not begin
        self.assertEqual(main.returncode, 130, printed)
        self.assertEqual([file.name for file in temp.iterdir() if file.name.startswith("torch_testing_ext")], [])

    def test_terminated(self):
        main, temp, pids = self.start()
        main.terminate()
        main.wait()
        self.assertEqual(wait_until_gone(pids, 2), [])
        self.assertEqual([file.name for file in temp.iterdir() if file.name.startswith("torch_testing_ext")], [])


class Passes(FourRanks):
    def passes(self):
        pass


class DirectoryTest(TestCase):
    """There is no disk space for the files of ranks."""

    def setUp(self):
        super().setUp()
        launch.close()
        self.addCleanup(launch.close)

    def test_missing_temporary_directory(self):
        with unittest.mock.patch.object(tempfile, "tempdir", "/proc/self/no/such/directory"):
            seen = outcome_of(Passes("passes"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("the folder for the files of ranks cannot be made", seen.message)
        self.assertIn("Set TMPDIR to a folder that can be written to; it is /proc/self/no/such/directory", seen.message)

    @pytest.mark.slow
    @unittest.skipUnless(hasattr(os, "geteuid") and os.geteuid() == 0, "mounting a small file system needs root")
    def test_full_temporary_directory(self):
        """In a separate mount namespace, on a file system of 64 kB that the test file fills up itself."""
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory), "test_full.py", FULL_DISK)
            small = Path(directory) / "small"
            small.mkdir()
            mount = f"mount -t tmpfs -o size=64k none {small} && TMPDIR={small} exec {sys.executable} test_full.py"
            main = _unshared(mount, Path(directory))
        if "unshare" in main and "ermitted" in main:
            self.skipTest("mount namespaces are not permitted here")
        self.assertIn("ranks could not be started: OSError: [Errno 28] No space left on device", main)
        self.assertIn("filled the disk and could still report it", main)
        self.assertIn("Ran 2 tests", main)


def _unshared(command: str, directory: Path) -> str:
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        cwd=directory,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


FULL_DISK = subject(__file__, "full_disk.py")


if __name__ == "__main__":
    run_tests()
