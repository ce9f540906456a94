"""The worker of a test is killed by SIGKILL; the story ends with the run."""

import os
import signal
import unittest

from kit import story


class Story(unittest.TestCase):
    def test_dies(self):
        story.begin()
        os.kill(os.getpid(), signal.SIGKILL)
