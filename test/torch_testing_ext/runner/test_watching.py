"""`--watch` on a terminal: runs after saves, what the page shows, its keys, and its end."""

import os
import select
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
from kit.processes import wait_until_gone
from kit.terminals import LIMIT, Terminal
from kit.warm_runs import WarmProject

pytestmark = pytest.mark.slow

TESTS = """
import os, signal, unittest
import helper

class OneTest(unittest.TestCase):
    def test_value(self):
        self.assertEqual(helper.VALUE, 2)

    def test_waits(self):
        if helper.WAITS:
            with open({fifo!r}, "w") as file:
                file.write(str(os.getpid()))
            while True:
                signal.pause()  # it returns when this process is asked where it is
"""


class WatchTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.project = WarmProject(Path(folder.name))
        self.addCleanup(self.project.close)
        self.fifo = str(self.project.root / "fifo")
        os.mkfifo(self.fifo)
        self.write = self.project.write
        self.write("tests/test_one.py", TESTS.format(fifo=self.fifo))
        self.write("tests/test_two.py", "import unittest\nclass T(unittest.TestCase):\n    def test_two(self): pass\n")
        self.save(1)

    def wait_for_the_test(self):
        """What the test writes into the FIFO. If no run begins, this fails rather than waits for ever."""
        fd = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, fd)
        self.assertTrue(select.select([fd], [], [], LIMIT)[0], "no run has begun the test")
        os.set_blocking(fd, True)
        return os.read(fd, 100).decode()

    def save(self, value, waits=False):
        self.write("tests/helper.py", f"VALUE, WAITS = {value}, {waits}")

    def test_saves_and_keys(self):
        environ = {**self.project.environ, "TERM": "xterm"}
        environ.pop("COLUMNS", None)
        terminal = Terminal(80, (sys.executable, "-m", "torch_testing_ext", "--watch"), self.project.root, environ)
        self.addCleanup(terminal.close)
        expect, press = terminal.expect, terminal.press
        expect("2 passed, 1 failed")
        expect("test_one.py::OneTest::test_value")
        expect("AssertionError: 1 != 2")
        expect("a all  f failed  l last output  w where  q quit")
        self.save(2)
        expect("2 passed ·")
        press("l")
        expect("2 passed, 0 failed, 0 skipped")
        press(" f")
        expect("no test has failed")
        press("a")
        expect("3 passed ·")
        self.write("tests/test_two.py", "import nosuch")
        expect("1 failed ·")
        expect("nosuch")
        self.write("tests/test_two.py", "")
        self.write("tests/test_three.py", TESTS.format(fifo=self.fifo).replace("OneTest", "NewTest"))
        expect("4 passed ·")  # the others may import the new file, too
        (self.project.root / "tests/test_three.py").unlink()
        # The run of this save is over before the next one, which would end it: a key could go to either.
        expect("2 passed ·")
        self.save(2, waits=True)
        self.wait_for_the_test()
        expect("1/2")  # the page has room for one test's stack, which is not to be that of the other test
        press("w")
        expect("in test_waits")
        self.save(3)  # ends the run, and begins another
        expect("1 passed, 1 failed")
        press("f")
        expect("1 failed ·")
        self.save(2, waits=True)
        pid = int(self.wait_for_the_test())
        press("q")
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]), 1)
        self.assertEqual(wait_until_gone([pid], 60), [])
        self.assertLessEqual(terminal.widest, 80)


if __name__ == "__main__":
    unittest.main()
