"""Which threads keep a process from being forked."""

import _thread
import ctypes
import faulthandler
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

import pytest
import torch
from kit.files import subject

from torch_testing_ext._process import fork_safety, system
from torch_testing_ext.common_utils import run_tests

ROOT = Path(__file__).resolve().parents[3]
IN_A_WORKER = subject(__file__, "threads_of_a_worker.py")


@unittest.skipUnless(system.CAN_FORK, "ranks are forked on Linux only")
class ThreadsTest(unittest.TestCase):
    """pytest-timeout and pytest-rerunfailures have threads that wait while a test runs."""

    def verdicts_with(self, module: str, timer: bool) -> tuple[str | None, str | None]:
        """What both checks say while a thread waits whose function is of this module."""
        done = threading.Event()

        def wait() -> None:
            done.wait()

        wait.__module__ = module
        thread = threading.Timer(3600, wait) if timer else threading.Thread(target=wait)
        thread.daemon = True
        thread.start()
        try:
            return fork_safety.prepare_to_fork(), fork_safety.check_after_fork()
        finally:
            done.set()
            if isinstance(thread, threading.Timer):
                thread.cancel()
            thread.join()

    def test_they_do_not_count(self) -> None:
        self.assertEqual(self.verdicts_with("pytest_timeout", timer=True), (None, None))
        self.assertEqual(self.verdicts_with("pytest_rerunfailures", timer=False), (None, None))

    def test_others_do(self) -> None:
        for timer in (True, False):
            self.assertIn("it runs other threads", str(self.verdicts_with("pytest_other", timer)[0]))

    @pytest.mark.slow
    def test_one_that_has_been_joined(self) -> None:
        """It is in the process for a moment longer, in most of these attempts."""
        for _ in range(30):
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
            self.assertEqual((fork_safety.prepare_to_fork(), fork_safety.check_after_fork()), (None, None))

    def test_the_watchdog_of_pytest_ends(self) -> None:
        """That of `faulthandler_timeout`, which this process has with any timeout."""
        self.addCleanup(faulthandler.cancel_dump_traceback_later)
        faulthandler.dump_traceback_later(3600, file=sys.__stderr__)
        self.assertIn("1 native threads", str(fork_safety.check_after_fork()))
        self.assertEqual((fork_safety.prepare_to_fork(), fork_safety.check_after_fork()), (None, None))

    def check_with_thread(self, name: bytes) -> str | None:
        """A thread of Python's `_thread` module takes the name that it asks for."""
        done, named = threading.Event(), threading.Event()

        def run() -> None:
            ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME
            named.set()
            done.wait()

        _thread.start_new_thread(run, ())
        named.wait()
        try:
            return fork_safety.check_after_fork()
        finally:
            done.set()

    def test_native_threads_are_named(self) -> None:
        expected = "it runs 1 native threads that a forked child would miss (%s)"
        for name in ("some_library", "cuda-EvtHandlr"):
            self.assertEqual(self.check_with_thread(name.encode()), expected % name)

    def test_threads_of_python_are_not_named(self) -> None:
        """A child does without those of plugins, and Python 3.14 gives each of them a name of the system."""
        done, named = threading.Event(), threading.Event()

        def wait() -> None:
            ctypes.CDLL(None).prctl(15, b"of_a_plugin", 0, 0, 0)
            named.set()
            done.wait()

        wait.__module__ = "pytest_timeout"
        thread = threading.Thread(target=wait)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(done.set)
        named.wait()
        self.assertIn("would miss (some_library)", str(self.check_with_thread(b"some_library")))

    def test_the_thread_of_nvml_is_not_missed(self) -> None:
        """Covered on a GPU by the check `fork-survives`."""
        self.assertIsNone(self.check_with_thread(b"cuda00001c00008"))

    def test_a_child_that_is_marked_has_torchs_threads(self) -> None:
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(system.cores())
        self.assertIn("1 native threads", str(self.check_with_thread(b"other")))
        pid = os.fork()
        if pid == 0:
            fork_safety.of_process.mark_fork_safe()
            os._exit(system.threads())
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), system.cores())

    @pytest.mark.slow
    @unittest.skipUnless(importlib.util.find_spec("xdist"), "needs pytest-xdist")
    def test_worker_of_xdist(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "test_it.py")
            file.write_text(IN_A_WORKER)
            command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", str(file)]
            environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
            run = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        self.assertIn("2 passed", run.stdout)


if __name__ == "__main__":
    run_tests()
