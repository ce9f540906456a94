"""While tests run: announcements of slow tests, status requests, and their output."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from kit.files import subject
from kit.jumping_loop import JumpingLoop
from kit.processes import heed_ctrl_c
from kit.project import Project
from kit.runs import RunsCase

from torch_testing_ext._process import user_commands
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner import events
from torch_testing_ext.runner.engine.running_unit import SUPERVISOR_TIMEOUT, Deadlines
from torch_testing_ext.runner.options import Options

HANGS = subject(__file__, "hangs.py")


ROOT = Path(__file__).resolve().parents[3]
# Makes the terminal on stdin its controlling terminal, as a shell does.
ON_A_TERMINAL = f"""
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, {str(ROOT / "run_test.py")!r}, *sys.argv[1:]])
"""
WAITS = """
import time, unittest
class T(unittest.TestCase):
    def test_alone(self):
        self.wait_for_ever()
    def wait_for_ever(self):
        open(FIFO, "w").close()
        time.sleep(600)  # hangs on purpose
"""


def setUpModule():
    global PROJECT
    heed_ctrl_c()
    PROJECT = Project()


def tearDownModule():
    PROJECT.close()


class TestStatus(TestCase):
    def test_a_slow_test_is_announced_and_sigusr1_shows_stacks(self):
        def react(event):
            if isinstance(event, events.TestIsSlow):
                os.kill(os.getpid(), signal.SIGUSR1)
            if isinstance(event, events.StatusRequested):
                os.kill(os.getpid(), signal.SIGINT)

        ran = PROJECT.run(PROJECT.write(HANGS), react=react, jobs=3, slow_after=1.0)
        self.assertTrue(ran.summary.interrupted)
        running = {one.test.id.method: one for one in ran.recorder.of(events.StatusRequested)[0].running}
        self.assertIn("in wait_for_ever", running["test_alone"].stacks)
        self.assertRegex(running["test_ranks"].stacks, r"rank0:\n.*\n *File .* in wait_for_the_other")
        self.assertGreaterEqual(max(one.seconds for one in running.values()), 1.0)
        self.assertEqual({test.id.method for test in ran.summary.unfinished}, {"test_ranks", "test_alone"})

    def test_a_timeout_of_ranks_is_explained_by_launch(self):
        ran = PROJECT.run(PROJECT.write(HANGS), timeout=1.0)
        self.assertEqual(ran.outcomes, {"test_ranks": "timeout", "test_alone": "timeout"})
        attempt = ran["test_ranks"]
        self.assertIn("where the running ranks are:", attempt.said)
        self.assertIn(f"run again:  {user_commands.runner()} ", attempt.said)
        self.assertEqual([log.output for log in attempt.ranks], ["rank 0 waits\n", ""])
        self.assertIn("in wait_for_the_other", attempt.ranks[0].stacks)

    def test_output_is_streamed_while_the_test_runs(self):
        fifo = PROJECT.root / "go"
        os.mkfifo(fifo)
        file = PROJECT.write(
            f"""
            import unittest
            class T(unittest.TestCase):
                def test_it(self):
                    print("before")
                    open({str(fifo)!r}).read()
                    print("after")
            """
        )

        def react(event):
            if isinstance(event, events.Output) and event.text == "before\n":
                open(fifo, "w").close()

        ran = PROJECT.run(file, react=react, stream=True)
        self.assertEqual("".join(event.text for event in ran.recorder.of(events.Output)), "before\nafter\n")
        self.assertEqual(ran["test_it"].output, "before\nafter\n")

    def test_all_output_is_streamed_however_it_is_written(self):
        fifo = PROJECT.root / "half"
        os.mkfifo(fifo)
        file = PROJECT.write(
            f"""
            import os, unittest
            class T(unittest.TestCase):
                def test_it(self):
                    os.write(1, b"half of a character: \\xc3")
                    open({str(fifo)!r}).read()
                    os.write(1, b"\\xbc\\n")
                    print("line\\n" * 30_000)
            """
        )

        def react(event):
            if isinstance(event, events.Output) and event.text.startswith("half") and fifo.exists():
                open(fifo, "w").close()
                fifo.unlink()

        ran = PROJECT.run(file, react=react, stream=True)
        written = "half of a character: ü\n" + "line\n" * 30_000 + "\n"
        self.assertTrue("".join(event.text for event in ran.recorder.of(events.Output)) == written)


class DeadlineTest(TestCase):
    def test_the_next_test_is_not_ended_for_the_one_before(self):
        """That one ends while its stacks are taken, which takes time."""
        for has_ended in (False, True):
            loop, ask_for_stacks, end = JumpingLoop.of(self), mock.Mock(), mock.Mock()
            deadlines = Deadlines(loop, Options(), ask_for_stacks, end)
            deadlines.begin(5.0)
            loop.run_for(5.1)
            answer = ask_for_stacks.call_args.args[0]
            if has_ended:
                deadlines.begin(1000.0)  # as when the next test begins
            answer("stacks")
            loop.run_for(SUPERVISOR_TIMEOUT + 1)
            self.assertEqual(end.called, not has_ended)

    def test_it_ends_without_stacks(self):
        loop, ask_for_stacks, end = JumpingLoop.of(self), mock.Mock(), mock.Mock()
        Deadlines(loop, Options(), ask_for_stacks, end).begin(5.0)
        loop.run_for(4.9)
        self.assertFalse(ask_for_stacks.called)
        loop.run_for(SUPERVISOR_TIMEOUT)
        self.assertTrue(ask_for_stacks.called)
        self.assertFalse(end.called)
        loop.run_for(0.2)
        self.assertTrue(end.called)

    def test_a_slow_test(self):
        loop, when_slow, end = JumpingLoop.of(self), mock.Mock(), mock.Mock()
        deadlines = Deadlines(loop, Options(slow_after=3.0), mock.Mock(), end)
        deadlines.begin(5.0, when_slow)
        loop.run_for(2.9)
        self.assertFalse(when_slow.called)
        loop.run_for(0.2)
        self.assertTrue(when_slow.called)
        deadlines.close()
        loop.run_for(100.0)
        self.assertFalse(end.called)

    def test_none_under_a_debugger(self):
        loop, ask_for_stacks = JumpingLoop.of(self), mock.Mock()
        Deadlines(loop, Options(pdb=True), ask_for_stacks, mock.Mock()).begin(5.0)
        loop.run_for(1000.0)
        self.assertFalse(ask_for_stacks.called)


@pytest.mark.slow
class TestKey(TestCase):
    def test_t_prints_the_status(self):
        fifo = PROJECT.root / "waits"
        os.mkfifo(fifo)
        file = PROJECT.root / PROJECT.write(WAITS.replace("FIFO", repr(str(fifo))))
        terminal, theirs = pty.openpty()
        self.addCleanup(os.close, terminal)
        words = ["--cache", str(PROJECT.root / "cache"), "--drop-in", str(file)]  # a file outside the project
        run = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *words],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        os.close(theirs)
        open(fifo).close()  # the test is running
        os.write(terminal, b"t")
        said = ""
        for line in run.stdout:
            said += line
            if "in wait_for_ever" in line:
                run.send_signal(signal.SIGINT)
        self.assertEqual(run.wait(), 2, said)
        self.assertRegex(said, r"(?s)test_alone.*in wait_for_ever.*\n0 passed, 0 failed, 0 skipped\n$")


class TestLeases(TestCase):
    def test_a_test_sees_its_devices_and_no_two_share_one(self):
        file = PROJECT.write(
            """
            import os, unittest
            from torch_testing_ext._testing.marks import needs
            class T(unittest.TestCase):
                @needs.requires(needs.Need(lambda: None, devices=2))
                def test_a(self): print(os.environ["TORCH_TESTING_EXT_FAKE_DEVICES"])
                test_b = test_c = test_a
                @needs.requires(needs.Need(lambda: None, devices=9))
                def test_d(self): pass
"""
        )
        ran = PROJECT.run(file, devices=4, jobs=4)
        self.assertEqual(
            {name: ran.outcomes[name] for name in ("test_a", "test_b", "test_c")},
            dict.fromkeys(("test_a", "test_b", "test_c"), "passed"),
        )
        self.assertEqual((ran.outcomes["test_d"], ran["test_d"].end.want), ("skipped", "9 devices"))
        held = set()
        for event in ran.recorder.events:
            if isinstance(event, events.UnitBegan):
                self.assertFalse(held & set(event.lease.devices))
                held |= set(event.lease.devices)
            if isinstance(event, events.UnitEnded):
                held -= set(event.lease.devices)
        for name in ("test_a", "test_b", "test_c"):
            self.assertEqual(ran[name].output, ",".join(ran[name].lease.devices) + "\n")


class TestRanks(TestCase):
    def test_outcomes_are_those_of_launch(self):
        ran = PROJECT.run(PROJECT.write(subject(__file__, "ends_while_running.py")))
        self.assertEqual(
            ran.outcomes,
            {
                "test_passes": "passed",
                "test_fails": "failed",
                "test_raises": "error",
                "test_crashes": "crashed",
                "test_skips": "skipped",
                "test_wants": "skipped",
                "test_fails_as_expected": "expected failure",
            },
        )
        self.assertTrue(ran["test_fails"].said.startswith("rank 1 of 2 failed"), ran["test_fails"].said)
        self.assertEqual(ran["test_wants"].end.want, "4 devices")
        self.assertIsNone(ran["test_skips"].end.want)
        self.assertEqual([log.output for log in ran["test_passes"].ranks], ["rank 0\n", "rank 1\n"])
        self.assertEqual(ran["test_passes"].test.world_size, 2)


@pytest.mark.slow
class TestKeptLogs(RunsCase):
    def test_those_of_an_earlier_run_are_not_shown(self):
        self.write("test_it.py", HANGS.replace("time.sleep(600)", "raise ValueError"))
        kept, found = self.root / "logs", []
        for number in (1, 2):
            # Cold: the end of this module's project would end the server of the tests, a child of this process, too.
            environ = {"TORCH_TESTING_EXT_LOGS": str(kept)}
            run = self.start("test_it.py", "--junitxml=x.xml", environ=environ, cold=True)
            self.finish(run, 1)
            found.append((self.root / "x.xml").read_text().count("rank 0 waits"))
            self.assertEqual(len([*kept.glob("*/unit*/*/rank0.log")]), number)
        self.assertEqual(found[0], found[1])


if __name__ == "__main__":
    run_tests()
