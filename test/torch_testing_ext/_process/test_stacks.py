"""Tests stacks on request: of a process that runs Python code, and of one that does not come to it."""

import ctypes
import os
import signal
import time
from pathlib import Path

from kit.files import FolderCase

from torch_testing_ext._process import stacks, system
from torch_testing_ext.common_utils import run_tests


def length(number):
    return len(str(number))


def computes():
    while True:
        sum(map(length, range(100)))


def keeps_the_gil():
    mutex = ctypes.create_string_buffer(64)  # zeroed: a mutex that is free
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


class StacksTest(FolderCase):
    def start(self, function):
        """Run a function in a fork of this process, which has announced that it can be asked."""
        path = self.write("stacks")
        reading, writing = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                system.die_with(parent, signal.SIGKILL)
                stacks.write_on_request(path)
                os.close(writing)
                function()
            finally:
                os._exit(1)
        self.addCleanup(os.waitpid, pid, 0)
        self.addCleanup(os.kill, pid, signal.SIGKILL)
        os.close(writing)
        os.read(reading, 1)  # the end of the file: it has closed its end, too
        os.close(reading)
        return pid, path

    def ask(self, pid, path, number, wanted):
        """Returns what a process writes to its file, when it has written this.

        Python may overlook a signal that comes just when it takes its lock: then it is asked again.
        """
        os.truncate(path, 0)
        asked = 0.0
        while wanted not in (text := path.read_text()):
            if time.monotonic() - asked > 1:
                asked = time.monotonic()
                os.kill(pid, number)
            self.assertEqual(os.waitpid(pid, os.WNOHANG), (0, 0))
        return text

    def test_of_python_code(self):
        """Asked at so many moments, one of them would be a wrong one for faulthandler's own handler."""
        pid, path = self.start(computes)
        for _ in range(400):
            text = self.ask(pid, path, system.DUMP_STACKS, "in computes")
        self.assertNotIn(stacks.__file__, text)

    def test_of_c_code_with_the_gil(self):
        pid, path = self.start(keeps_the_gil)
        while "futex" not in Path(f"/proc/{pid}/wchan").read_text():
            os.sched_yield()
        self.ask(pid, path, system.DUMP_STACKS_NOW, "in keeps_the_gil")

    def test_a_closed_file(self):
        reading, writing = os.pipe()
        os.close(reading)
        os.close(writing)
        stacks.write_stacks(writing)


if __name__ == "__main__":
    run_tests()
