"""Which threads keep a process from being forked."""

import threading
import unittest

from torch_testing_ext._process import fork_safety, system
from torch_testing_ext.common_utils import run_tests


@unittest.skipUnless(system.CAN_FORK, "ranks are forked on Linux only")
class ThreadsOfPluginsTest(unittest.TestCase):
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


if __name__ == "__main__":
    run_tests()
