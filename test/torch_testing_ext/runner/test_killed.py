"""Killing any process of a run: the outcome is reported, the run continues, and no process is left."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.processes import descendants, heed_ctrl_c, is_alive
from kit.project import Project

import torch_testing_ext
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner import events

# The first test waits to be killed; its helper in another session must end, too. The others pass at once.
SOURCE = """
import os, subprocess, time, unittest
class T(unittest.TestCase):
    def test_a_waits(self):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open(os.environ["READY"], "w").close()
        time.sleep(1000)
    def test_b_is_fine(self): pass
    def test_c_is_fine(self): pass
"""


def setUpModule():
    global PROJECT
    heed_ctrl_c()
    PROJECT = Project()


def tearDownModule():
    PROJECT.close()


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for_pid(file):
    """The pid of the worker, which writes it when its test waits."""
    fd = os.open(file, os.O_RDONLY)
    try:
        return int(os.read(fd, 100))
    finally:
        os.close(fd)


class TestKilled(TestCase):
    def run_and_kill(self, generations):
        """Runs a file and, when its first test waits, kills the ancestor of the worker that is `generations` up."""
        ready = PROJECT.root / f"ready{generations}"
        os.mkfifo(ready)
        source = SOURCE.replace(
            'open(os.environ["READY"], "w").close()', f'print(os.getpid(), file=open({str(ready)!r}, "w"))'
        )
        file = PROJECT.write(source)
        killed = []

        def react(event):
            if isinstance(event, events.TestBegan) and event.test.id.method == "test_a_waits" and not killed:
                victim = wait_for_pid(ready)
                below = descendants(victim)
                for _ in range(generations):
                    below.add(victim)
                    victim = parent_of(victim)
                    below |= descendants(victim)
                killed.extend([victim, *below])
                os.kill(victim, signal.SIGKILL)

        ran = PROJECT.run(file, react=react, jobs=1)
        self.assertEqual([pid for pid in killed if is_alive(pid)], [])
        self.assertGreaterEqual(len(killed), 2 + generations)
        return ran

    def check(self, ran, said):
        self.assertEqual(
            ran.outcomes, {"test_a_waits": "crashed", "test_b_is_fine": "passed", "test_c_is_fine": "passed"}
        )
        self.assertIn(said, ran["test_a_waits"].said)

    def test_the_worker(self):
        self.check(self.run_and_kill(0), "the test's process was killed by SIGKILL")

    def test_the_supervisor(self):
        self.check(self.run_and_kill(1), "the process that watched it was killed by SIGKILL")

    def test_the_process_of_the_file(self):
        self.check(self.run_and_kill(2), "the process that watched it")

    @pytest.mark.slow
    def test_the_preloaded_server(self):
        self.check(self.run_and_kill(3), "the process that watched it")


DRIVER = """
import sys
sys.path.insert(0, {support!r})
from kit.project import Project
from kit.processes import heed_ctrl_c
project = Project()
file = project.write({source!r})
print(project.root, flush=True)
ran = project.run(file, jobs=2)
print(ran.outcomes, ran.summary.interrupted, [test.id.method for test in ran.summary.unfinished])
project.close()
"""


class TestTheRunItself(TestCase):
    """The process of run_test.py, which is another process than this one."""

    def start(self, source):
        """Starts a run and waits until its test waits. Returns the process, and the pids of all that it started."""
        fifo = PROJECT.root / self.id().replace(".", "_")
        os.mkfifo(fifo)
        support = str(Path(__file__).parent)
        code = DRIVER.format(support=support, source=source.replace("FIFO", repr(str(fifo))))
        self.temporary = PROJECT.root / f"tmp_{self.id()}"
        self.temporary.mkdir()
        package = str(Path(torch_testing_ext.__file__).parents[1])
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": package, "TMPDIR": str(self.temporary)},
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        worker = wait_for_pid(fifo)
        return process, descendants(process.pid) | descendants(worker)

    WAITS = """
import os, signal, subprocess, time, unittest
class T(unittest.TestCase):
    def test_waits(self):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print(os.getpid(), file=open(FIFO, "w"))
        time.sleep(1000)
"""

    def wait_until_gone(self, pids, seconds):
        fds = []
        for pid in pids:
            try:
                fds.append(os.pidfd_open(pid))
            except OSError:
                continue
        deadline = time.monotonic() + seconds
        for fd in fds:
            select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            os.close(fd)
        return [pid for pid in pids if is_alive(pid)]

    def test_sigkill_leaves_nothing_after_2_seconds(self):
        process, started = self.start(self.WAITS)
        self.assertGreaterEqual(len(started), 5)  # preloaded server, file, supervisor, worker, sleep
        process.kill()
        process.wait()
        self.assertEqual(self.wait_until_gone(started, 2.0), [])
        self.assertEqual([path.name for path in self.temporary.iterdir() if "_run_" in path.name], [])

    @pytest.mark.slow
    def test_ctrl_c_ends_running_tests_and_reports_the_rest(self):
        process, started = self.start(self.WAITS)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertIn("{} True ['test_waits']", out, err)
        self.assertEqual([pid for pid in started if is_alive(pid)], [])

    @pytest.mark.slow
    def test_sigterm_does_too_even_if_the_test_ignores_it(self):
        process, started = self.start(
            self.WAITS.replace("subprocess.Popen", "signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen")
        )
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        self.assertIn("{} True ['test_waits']", out, err)
        self.assertEqual([pid for pid in started if is_alive(pid)], [])


if __name__ == "__main__":
    run_tests()
