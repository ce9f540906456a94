"""Tests of a class that shares something costly, as does the module."""

import subprocess
import sys
import time
import unittest

import pytest


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture(scope="module", autouse=True)
def for_the_module():
    compute(0.2)


class SharingTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        compute(0.3)

    @classmethod
    def tearDownClass(cls):
        compute(0.2)

    def test_a(self):
        pass

    def test_b(self):
        pass


def test_c():
    pass


class ServerTest(unittest.TestCase):
    """Shares a process that is not ready at once, and outlives the first test."""

    @classmethod
    def setUpClass(cls):
        code = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ntime.sleep(60)"
        cls.server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

    @classmethod
    def tearDownClass(cls):
        cls.server.kill()
        cls.server.communicate()

    def test_d(self):
        self.server.stdout.readline()

    def test_e(self):
        pass
