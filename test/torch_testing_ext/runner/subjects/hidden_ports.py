import os
import socket
import time
import unittest
from pathlib import Path

holds, failed = Path("holds"), Path("failed")


def wait_for(path):
    while not path.exists():
        time.sleep(0.001)


class T(unittest.TestCase):
    def bind(self):
        server = socket.socket()
        self.addCleanup(server.close)
        server.bind(("localhost", int(os.environ["HIDDEN"])))
        server.listen()

    def test_first(self):
        self.bind()
        holds.touch()
        wait_for(failed)

    def test_second(self):
        wait_for(holds)
        try:
            self.bind()
        except OSError:
            failed.touch()
            raise
