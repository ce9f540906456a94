"""Tests whose process dies, hangs, or leaves processes or threads running."""

import os
import signal
import subprocess
import sys
import threading
import unittest

from torch_testing_ext.common_utils import timeout

A_LONG_TIME = 600


class CrashingTest(unittest.TestCase):
    def test_is_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def test_segfaults(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def test_exits_early(self):
        os._exit(0)

    def test_leaks_a_process(self):
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({A_LONG_TIME})"], start_new_session=True)

    def test_leaks_a_thread(self):
        threading.Thread(target=threading.Event().wait).start()

    @timeout(1)
    def test_hangs(self):
        threading.Event().wait(A_LONG_TIME)

    @timeout(1)
    def test_ignores_sigterm(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait(A_LONG_TIME)

    def test_of_the_neighbours(self):
        pass
