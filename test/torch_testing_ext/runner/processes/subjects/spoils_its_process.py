"""Tests that spoil their process, for `test_fixture_ends.py`: each way before a pass, and before a failure."""

import json
import os
import resource
import signal
import sys
import tempfile
import time
import unittest


def no_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def another_user():
    os.setgid(65534)
    os.setuid(65534)


def another_root():
    os.chroot(tempfile.mkdtemp(dir=os.path.dirname(__file__)))
    os.chdir("/")


def no_folder():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def no_rights():
    os.umask(0o777)


def no_environment():
    os.environ.clear()


def no_standard_streams():
    for fd in (0, 1, 2):
        os.close(fd)


def no_log():
    os.unlink(os.readlink("/proc/self/fd/1"))


def no_stdout():
    sys.stdout = sys.stderr = None


def no_functions():
    json.dumps = os.listdir = None
    os.getpid = time.monotonic = lambda: 1


def no_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))


WAYS = (
    no_descriptors,
    no_folder,
    no_rights,
    no_environment,
    no_standard_streams,
    no_log,
    no_stdout,
    no_functions,
    no_signals,
    *((another_user, another_root) if os.getuid() == 0 else ()),
)


class Spoils(unittest.TestCase):
    pass


def _make(way, fails):
    def test(self):
        way()
        if fails:
            self.fail("for a reason of its own")

    return test


for _way in WAYS:
    setattr(Spoils, f"test_{_way.__name__}", _make(_way, False))
    setattr(Spoils, f"test_fails_{_way.__name__}", _make(_way, True))
