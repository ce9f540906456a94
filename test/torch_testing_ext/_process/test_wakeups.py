"""Threads that wait in the kernel and are woken by a signal that does nothing."""

import ctypes
import errno
import os
import select
import signal
import threading
import unittest
from pathlib import Path

from torch_testing_ext._process import system, wakeups


class Sleeper(threading.Thread):
    """Waits in epoll_wait, without an end, and remembers the error that it returned."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.error = 0
        self.start()
        self.begun.wait()

    def run(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        with select.epoll() as nothing:
            self.begun.set()
            if library.epoll_wait(nothing.fileno(), ctypes.create_string_buffer(16), 1, -1) == -1:
                self.error = ctypes.get_errno()


def is_caught() -> bool:
    """Has this process any handler for the signal, also one that Python does not know?"""
    lines = Path("/proc/self/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(mask >> (signal.SIGURG - 1) & 1)


@unittest.skipUnless(system.LINUX, "timers for threads are Linux's")
class WakeupsTest(unittest.TestCase):
    def test_a_thread_is_woken(self) -> None:
        sleeper = Sleeper()
        assert sleeper.native_id is not None
        with wakeups.waking([sleeper.native_id]):
            sleeper.join(60)
        self.assertEqual(sleeper.error, errno.EINTR)

    def test_others_sleep_on(self) -> None:
        others, sleeper = [Sleeper(), Sleeper()], Sleeper()
        assert sleeper.native_id is not None
        with wakeups.waking([sleeper.native_id]):
            sleeper.join(60)
        self.assertEqual([other.is_alive() for other in others], [True, True])
        with wakeups.waking([other.native_id for other in others if other.native_id]):
            for other in others:
                other.join(60)
        self.assertEqual([other.error for other in others], [errno.EINTR] * 2)

    def test_the_handler_is_there_only_within(self) -> None:
        self.assertFalse(is_caught())
        with wakeups.waking([]):
            self.assertTrue(is_caught())
            with wakeups.waking([]):
                self.assertTrue(is_caught())
            self.assertTrue(is_caught())
            self.assertIs(signal.getsignal(signal.SIGURG), signal.SIG_DFL)
        self.assertFalse(is_caught())

    def test_it_goes_after_an_error(self) -> None:
        with self.assertRaises(KeyError), wakeups.waking([threading.get_native_id()]):
            raise KeyError
        self.assertFalse(is_caught())

    def test_windows_that_end_in_another_order(self) -> None:
        first, second = wakeups.waking([]), wakeups.waking([])
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        self.assertTrue(is_caught())
        second.__exit__(None, None, None)
        self.assertFalse(is_caught())

    def test_a_handler_of_the_test_is_left_alone(self) -> None:
        """Nor is it called: the thread sleeps on."""
        seen: list[int] = []
        before = signal.signal(signal.SIGURG, lambda number, _: seen.append(number))
        try:
            with wakeups.waking([threading.get_native_id()]):
                os.kill(os.getpid(), signal.SIGURG)
            os.kill(os.getpid(), signal.SIGURG)
        finally:
            signal.signal(signal.SIGURG, before)
        self.assertEqual(seen, [signal.SIGURG] * 2)

    def test_ignored_before_and_after(self) -> None:
        before = signal.signal(signal.SIGURG, signal.SIG_IGN)
        try:
            sleeper = Sleeper()
            assert sleeper.native_id is not None
            with wakeups.waking([sleeper.native_id]):
                sleeper.join(60)
            self.assertEqual(sleeper.error, errno.EINTR)
            status = Path("/proc/self/status").read_text()
            ignored = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:"))
            self.assertTrue(ignored >> (signal.SIGURG - 1) & 1)
        finally:
            signal.signal(signal.SIGURG, before)

    def test_threads_that_do_not_exist(self) -> None:
        number = (1 << 22) + 1  # Linux gives no thread a number that is so large
        with wakeups.waking([number]):
            pass
        self.assertEqual(wakeups.thread_names([number]), {})

    def test_threads_by_name(self) -> None:
        own = threading.get_native_id()
        self.assertIn(own, wakeups.all_threads())
        self.assertEqual(wakeups.thread_names([own]), {own: Path(f"/proc/self/task/{own}/comm").read_text().strip()})


if __name__ == "__main__":
    unittest.main()
