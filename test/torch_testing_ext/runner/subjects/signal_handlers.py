import os
import signal
import unittest

from torch_testing_ext.common_distributed import MultiProcessTestCase


class T(unittest.TestCase):
    def test_waits(self):
        open("running", "w").close()
        open("sent").close()

    def test_handlers(self):
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
            self.assertEqual(signal.getsignal(number), signal.SIG_DFL)
        with self.assertRaises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    test_handlers = T.test_handlers
