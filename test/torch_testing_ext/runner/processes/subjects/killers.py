import os
import signal
import unittest
from pathlib import Path


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class T(unittest.TestCase):
    def kill_the_preloaded_server(self):
        os.kill(parent_of(parent_of(parent_of(os.getpid()))), signal.SIGKILL)
        signal.pause()

    def test_z_is_fine(self):
        pass
