"""The audit hook, which no process can remove: each test has an interpreter of its own."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from torch_testing_ext._process import read_hook

BEGIN = """
import os, sys, threading
from torch_testing_ext._process.file_reads import ReadHook, may_write, path_of

seen, errors = [], []

def opened(event, path, mode, flags):
    with open(os.devnull):  # is not seen
        seen.append((os.path.basename(path_of(path) or ""), may_write(flags)))

def listed(event, path=None):
    seen.append((path_of(path), sys._getframe(2).f_code.co_name))

def fails(event, *arguments):
    raise ValueError

hook = ReadHook({"open": opened, "os.listdir": listed, "os.mkdir": fails}, errors.append)
"""

REPLACED = """
import contextlib
from unittest import mock
from torch_testing_ext._process import file_reads

hook.stop()
file_reads.begin("record")
names = "open close read write stat lstat listdir scandir unlink getcwd path.abspath path.isdir"
with contextlib.ExitStack() as stack:
    replaced = [f"os.{name}" for name in names.split()] + ["time.time", "builtins.open"]
    mocks = {name: stack.enter_context(mock.patch(name)) for name in replaced}
    for mocked in mocks.values():
        mocked.reset_mock()
    sys.audit("open", "read.txt", "r", 0)
    sys.audit("os.listdir", ".")
    errors = [name for name, mocked in mocks.items() if mocked.called]
paths = {os.path.basename(path) for path in file_reads.read_record("record")}
seen = sorted(path for path in paths if path.startswith(("read.txt", os.path.basename(os.getcwd()))))
"""


class TestReadHook(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()

    def seen(self, code: str) -> str:
        """What the hook has seen and what has failed of the events of `code`."""
        done = subprocess.run(
            [sys.executable, "-c", f"{BEGIN}\n{code}\nprint(seen, errors)"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def test_reads_and_writes(self) -> None:
        self.assertEqual(self.seen("open('a', 'w').close(); open('a').close()"), "[('a', True), ('a', False)] []")

    def test_the_frame_of_the_cause(self) -> None:
        code = "def look():\n  return os.listdir()\nlook()"
        self.assertEqual(self.seen(code), f"[('{self.folder}', 'look')] []")

    def test_an_error_is_told_and_the_event_happens(self) -> None:
        self.assertEqual(self.seen("os.mkdir('made')"), "[] ['os.mkdir']")
        self.assertTrue((self.folder / "made").is_dir())

    def test_nothing_is_seen_after_stop(self) -> None:
        self.assertEqual(self.seen("hook.stop(); open('a', 'w').close(); os.mkdir('b')"), "[] []")

    def test_other_threads_are_seen_meanwhile(self) -> None:
        """A listener that waits for another thread's event, which comes while it runs."""
        code = """
arrived, done = threading.Event(), threading.Event()
def slow(event, path, mode, flags):
    name = os.path.basename(path_of(path))
    seen.append(name)
    if name == "first":
        arrived.set()
        done.wait(60)
hook._listeners = {"open": slow}
def other():
    arrived.wait(60)
    open("second", "w").close()
    done.set()
thread = threading.Thread(target=other)
thread.start()
open("first", "w").close()
thread.join()
"""
        self.assertEqual(self.seen(code), "['first', 'second'] []")

    def test_paths_of_events(self) -> None:
        here = os.getcwd()
        self.assertEqual([read_hook.path_of(value) for value in (None, "", b"a", 3)], [here, here, f"{here}/a", None])
        self.assertTrue(read_hook.may_write(os.O_RDWR) and not read_hook.may_write(os.O_CREAT))

    def test_functions_that_a_test_replaces_are_not_called(self) -> None:
        """As blocking calls in an event loop are caught, or counted by a mock."""
        (self.folder / "read.txt").write_text("text")
        seen = self.seen(REPLACED)
        self.assertEqual(seen, f"['read.txt', '{self.folder.name}*'] []")


if __name__ == "__main__":
    unittest.main()
