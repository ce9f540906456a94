"""Tests the event loop, signals as data, and the start and end of children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

from kit.jumping_loop import JumpingLoop

from torch_testing_ext._process import ends, files, logs, sessions, signals, system
from torch_testing_ext._process.ends import describe_exit
from torch_testing_ext._process.event_loop import EventLoop, wait_readable
from torch_testing_ext._process.signals import SignalReader, signal_name
from torch_testing_ext.common_utils import run_tests


class TestEventLoop(unittest.TestCase):
    def setUp(self) -> None:
        self.loop = EventLoop()
        self.addCleanup(self.loop.close)
        self.reading, self.writing = os.pipe()
        self.addCleanup(os.close, self.reading)
        self.addCleanup(os.close, self.writing)
        self.seen: list[str] = []

    def test_a_readable_source_is_called(self) -> None:
        self.loop.listen(self.reading, lambda: self.seen.append(os.read(self.reading, 9).decode()))
        os.write(self.writing, b"one")
        self.assertTrue(self.loop.step())
        self.assertEqual(self.seen, ["one"])

    def test_the_time_comes_first(self) -> None:
        self.loop.listen(self.reading, lambda: self.seen.append("never"))
        self.assertFalse(self.loop.step(until=time.monotonic()))
        self.assertEqual(self.seen, [])

    def test_timers_are_called_in_order_and_once(self) -> None:
        now = time.monotonic()
        self.loop.at(now - 1, lambda: self.seen.append("second"))
        self.loop.at(now - 2, lambda: self.seen.append("first"))
        self.loop.at(now - 3, lambda: self.seen.append("never")).cancel()
        self.assertTrue(self.loop.step())
        self.assertEqual(self.seen, ["first", "second"])
        self.assertFalse(self.loop.step(until=time.monotonic()))

    def test_a_timer_that_another_one_cancels(self) -> None:
        now = time.monotonic()
        later = self.loop.at(now - 1, lambda: self.seen.append("never"))
        self.loop.at(now - 2, later.cancel)
        self.loop.step()
        self.assertEqual(self.seen, [])

    def test_what_has_come_in_time_may_cancel_a_timer(self) -> None:
        """A callback takes so long that the timer is due, and meanwhile another source has become readable."""
        loop = JumpingLoop.of(self)
        other_reading, other_writing = os.pipe()
        self.addCleanup(os.close, other_reading)
        self.addCleanup(os.close, other_writing)
        deadline = loop.after(10.0, lambda: self.seen.append("too late"))

        def work() -> None:
            os.read(self.reading, 1)
            os.write(other_writing, b"x")
            loop.now += 20.0

        def end() -> None:
            os.read(other_reading, 1)
            self.seen.append("ended")
            deadline.cancel()
            loop.after(0.0, lambda: self.seen.append("after it"))

        loop.listen(self.reading, work)
        loop.listen(other_reading, end)
        os.write(self.writing, b"x")
        loop.step()
        loop.step()
        self.assertEqual(self.seen, ["ended", "after it"])

    def test_a_timer_whose_time_comes_while_a_callback_waits_in_the_loop(self) -> None:
        loop = JumpingLoop.of(self)
        loop.after(10.0, lambda: self.seen.append("once"))

        def wait() -> None:
            loop.forget(self.reading)
            loop.step()

        loop.listen(self.reading, wait)
        loop.now += 20.0
        os.write(self.writing, b"x")
        loop.step()
        self.assertEqual(self.seen, ["once"])

    def test_a_callback_that_raises_leaves_timers_due(self) -> None:
        loop = JumpingLoop.of(self)
        loop.after(10.0, lambda: 1 / 0)
        loop.after(11.0, lambda: self.seen.append("called"))
        loop.now += 20.0
        with self.assertRaises(ZeroDivisionError):
            loop.step()
        loop.step()
        self.assertEqual(self.seen, ["called"])

    def test_timers_follow_its_clock(self) -> None:
        loop = JumpingLoop.of(self)
        for seconds in (100.0, 0.1, 1e-9):
            loop.after(seconds, lambda seconds=seconds: self.seen.append(str(seconds)))
        loop.listen(self.reading, lambda: self.seen.append(os.read(self.reading, 9).decode()))
        os.write(self.writing, b"first")
        loop.run_for(99.0)
        self.assertEqual(self.seen, ["first", "1e-09", "0.1"])
        loop.step()
        self.assertEqual(self.seen[3:], ["100.0"])
        self.assertAlmostEqual(loop.now, 1100.0)

    def test_a_timer_wakes_the_loop(self) -> None:
        self.loop.after(0.01, lambda: self.seen.append("called"))
        while not self.seen:
            self.loop.step()
        self.assertEqual(self.seen, ["called"])

    def test_a_source_that_another_one_forgets(self) -> None:
        """Both are readable: the first stops listening to the second, which is then not called."""
        other_reading, other_writing = os.pipe()
        for source, other in ((self.reading, other_reading), (other_reading, self.reading)):

            def first(source: int = source, other: int = other) -> None:
                self.seen.append("first")
                self.loop.forget(source)
                self.loop.forget(other)

            self.loop.listen(source, first)
        os.write(self.writing, b"x")
        os.write(other_writing, b"x")
        self.loop.step()
        self.assertEqual(self.seen, ["first"])
        os.close(other_reading)
        os.close(other_writing)

    def test_to_forget_an_unknown_source(self) -> None:
        self.loop.forget(self.reading)

    def test_idle_work_waits_for_everything_else(self) -> None:
        self.loop.listen(self.reading, lambda: self.seen.append(os.read(self.reading, 9).decode()))
        for work in ("idle 1", "idle 2"):
            self.loop.when_idle(lambda work=work: self.seen.append(work))
        os.write(self.writing, b"message")
        for _ in range(3):
            self.loop.step()
        self.assertEqual(self.seen, ["message", "idle 1", "idle 2"])

    def test_idle_work_can_be_dropped(self) -> None:
        self.loop.when_idle(lambda: self.seen.append("never"))
        self.loop.drop_idle()
        self.assertFalse(self.loop.step(until=time.monotonic()))
        self.assertEqual(self.seen, [])

    def test_a_forked_child_does_not_disturb_it(self) -> None:
        self.loop.listen(self.reading, lambda: self.seen.append("called"))
        pid = os.fork()
        if pid == 0:
            self.loop.forget(self.reading)
            self.loop.close()
            os._exit(0)
        os.waitpid(pid, 0)
        os.write(self.writing, b"x")
        self.loop.step(until=time.monotonic() + 5)
        self.assertEqual(self.seen, ["called"])

    def test_wait_for_one_descriptor(self) -> None:
        self.assertFalse(wait_readable(self.reading, time.monotonic()))
        os.write(self.writing, b"x")
        self.assertTrue(wait_readable(self.reading, time.monotonic() + 5))


class TestSignals(unittest.TestCase):
    def test_they_are_read_in_order_and_counted(self) -> None:
        before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
        reader = SignalReader((signal.SIGUSR1, signal.SIGUSR2))
        try:
            for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            self.assertTrue(wait_readable(reader, time.monotonic() + 5))
            self.assertEqual(reader.read(), [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR1])
            self.assertEqual(reader.read(), [])
        finally:
            reader.close()
        self.assertEqual((signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)), before)

    def test_they_are_blocked_around_a_fork(self) -> None:
        with signals.blocked():
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            self.assertLessEqual({signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}, blocked)
        self.assertEqual(signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGTERM}, set())

    def test_a_group_is_signalled_and_a_process_without_one(self) -> None:
        for leads in (True, False):
            with self.subTest(leads=leads):
                process = subprocess.Popen(["sleep", "1000"], start_new_session=leads)
                if leads:
                    signals.signal_group(process.pid, signal.SIGKILL)
                else:
                    with mock.patch("os.killpg", side_effect=ProcessLookupError):
                        signals.signal_group(process.pid, signal.SIGKILL)
                self.assertEqual(process.wait(10), -signal.SIGKILL)

    def test_signalling_a_process_that_has_ended(self) -> None:
        process = subprocess.Popen(["true"])
        process.wait()
        signals.signal_group(process.pid, signal.SIGTERM)


class TestChildren(unittest.TestCase):
    def test_a_child_has_a_session_of_its_own(self) -> None:
        reading, writing = os.pipe()

        def report() -> None:
            os.write(writing, b"%d %d" % (os.getsid(0), os.getpid()))
            os._exit(7)

        pid = sessions.fork_child(report)
        os.close(writing)
        with open(reading) as pipe:
            self.assertEqual(pipe.read(), f"{pid} {pid}")
        self.assertEqual(ends.wait_for_exit(pid), 7)

    def test_an_exception_in_a_child_ends_it(self) -> None:
        with mock.patch("traceback.print_exc"):
            pid = sessions.fork_child(lambda: 1 / 0)
        self.assertEqual(ends.wait_for_exit(pid), 1)

    def test_a_child_dies_with_its_parent(self) -> None:
        code = (
            "import os, signal, sys, threading\n"
            "from torch_testing_ext._process import sessions, signals\n"
            "def wait():\n"
            "    signals.unblock()\n"
            "    threading.Event().wait()\n"
            "print(sessions.fork_child(wait), flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        pid = int(done.stdout)
        ends.wait_until_gone([pid], 10)
        self.assertFalse(_is_alive(pid))

    def test_reaping_gives_each_child_once(self) -> None:
        pids = {sessions.fork_child(lambda code=code: os._exit(code)): code for code in (3, 4)}
        for pid in pids:
            self.assertTrue(ends.has_ended(pid, 10))
        ended = {pid: os.waitstatus_to_exitcode(status) for pid, status in ends.reap() if pid in pids}
        self.assertEqual(ended, pids)
        self.assertIsNone(ends.wait_for_exit(next(iter(pids))))

    def test_a_process_that_has_not_ended(self) -> None:
        pid = sessions.fork_child(lambda: threading.Event().wait())
        self.assertFalse(ends.has_ended(pid, 0.01))
        os.kill(pid, signal.SIGKILL)
        self.assertEqual(ends.wait_for_exit(pid), -signal.SIGKILL)

    def test_all_children_except_the_kept_ones_are_ended(self) -> None:
        known = set(system.children(os.getpid()))
        kept, other = (subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2))
        while not Path(f"/proc/{other.pid}/cmdline").read_bytes():  # Popen returns a moment before exec has set it
            time.sleep(0.001)
        ended = ends.end_children(known | {kept.pid})
        self.assertEqual(ended, [f"pid {other.pid}: sleep 1000"])
        self.assertTrue(_is_alive(kept.pid))
        kept.kill()
        kept.wait()
        other.returncode = -signal.SIGKILL  # reaped above


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class TestExits(unittest.TestCase):
    def test_how_a_process_ended(self) -> None:
        for code, when, description in (
            (0, "", "exited with code 0"),
            (3, " 0.1 s into test_x", "exited with code 3 0.1 s into test_x"),
            (-11, "", "was killed by SIGSEGV"),
            (-9, " after 2 s", "was killed by SIGKILL after 2 s (out of memory?)"),
            (None, "", "ended in an unknown way"),
        ):
            with self.subTest(code=code):
                self.assertEqual(describe_exit(code, when), description)

    def test_a_signal_without_a_name(self) -> None:
        self.assertEqual((signal_name(9), signal_name(99)), ("SIGKILL", "signal 99"))


class TestFiles(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_written_completely(self) -> None:
        file = self.folder / "new" / "file"
        for text in ("first", "second"):
            files.write_atomically(file, text)
            self.assertEqual(file.read_text(), text)
        self.assertEqual(list(file.parent.iterdir()), [file])

    def test_a_failed_write_keeps_the_old_file(self) -> None:
        file = self.folder / "file"
        file.write_text("old")
        with mock.patch("os.replace", side_effect=OSError("full")), self.assertRaisesRegex(OSError, "full"):
            files.write_atomically(file, "new")
        self.assertEqual((file.read_text(), list(self.folder.iterdir())), ("old", [file]))

    def test_with_the_usual_permissions(self) -> None:
        before = os.umask(0o027)
        try:
            files.write_atomically(self.folder / "file", "text")
        finally:
            os.umask(before)
        self.assertEqual((self.folder / "file").stat().st_mode & 0o777, 0o640)

    def test_into_a_pipe(self) -> None:
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        files.write_atomically(pipe, "text")
        self.assertEqual(os.read(reading, 99), b"text")
        os.close(reading)

    def test_both_ends_of_a_long_log(self) -> None:
        log = self.folder / "log"
        log.write_text("a" * 100 + "b" * 100)
        self.assertEqual(logs.read_ends(log), "a" * 100 + "b" * 100)
        cut = logs.read_ends(log, longest=20)
        self.assertEqual(cut, f"{'a' * 10}\n... 180 bytes cut here ...\n{'b' * 10}")
        self.assertEqual(logs.read_ends(log, 99, 101), "ab")
        self.assertEqual(logs.read_ends(self.folder / "missing"), "")


class TestEndingProcesses(unittest.TestCase):
    def test_a_process_that_has_begun_to_exit_is_not_running(self) -> None:
        """Its parent has not waited for it: for what it says in /proc, it is still on its way."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        os.close(reading)
        self.assertFalse(system.is_ending(pid))
        os.close(writing)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self.assertTrue(system.is_ending(pid))
        os.waitpid(pid, 0)
        self.assertTrue(system.is_ending(pid))


class WithoutProcTest(unittest.TestCase):
    def test_connections_stay(self):
        with mock.patch.object(os, "listdir", side_effect=FileNotFoundError):
            sessions.leave_connections(0)


if __name__ == "__main__":
    run_tests()
