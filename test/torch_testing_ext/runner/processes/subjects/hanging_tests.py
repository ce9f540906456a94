import signal
import time
import unittest

from torch_testing_ext.common_utils import timeout


class T(unittest.TestCase):
    def test_hangs_for_the_default(self):
        time.sleep(600)

    @timeout(0.2)
    def test_hangs(self):
        self.wait_for_nothing()

    def wait_for_nothing(self):
        time.sleep(600)

    @timeout(0.2)
    def test_ignores_sigterm(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(600)
