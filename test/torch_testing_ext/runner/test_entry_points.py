"""run_test.py at the door: what is answered without torch, and quickly."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
# Each costs more than the tenth of a second in which the door answers, or would be the first step to it.
TOO_HEAVY = ("torch", "numpy", "rich", "asyncio", "multiprocessing", "torch_testing_ext.launch")
AND_TELL = f"""
import atexit, runpy, sys
atexit.register(lambda: print("heavy:", [name for name in {TOO_HEAVY} if name in sys.modules], file=sys.stderr))
sys.argv = ["run_test.py", *sys.argv[1:]]
runpy.run_path({str(ROOT / "run_test.py")!r}, run_name="__main__")
"""


def run(*argv, command=(str(ROOT / "run_test.py"),), **more):
    return subprocess.run([sys.executable, *command, *argv], capture_output=True, text=True, check=False, **more)


class DoorTest(unittest.TestCase):
    def test_answers_without_torch(self):
        for argument, code in (("--help", 0), ("--no-such-option", 4), ("--show-config", 0), ("no_such_test", 4)):
            with self.subTest(argument=argument):
                done = run(argument, command=("-c", AND_TELL), cwd=ROOT)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertEqual(done.stderr.splitlines()[-1], "heavy: []")

    def test_what_is_not_understood_is_said_without_a_traceback(self):
        for argv, said in (
            (("--shuffel",), "--shuffel is not an option. Did you mean: --shuffle"),
            (("no_such_test",), "no_such_test: no test file is called so, or begins so."),
            (("-k", "a and"), "-k 'a and': a part of a name, not or ( is expected in place of its end"),
            (("--tests", "nowhere"), "there is no such folder"),
            ((sys.executable + ".py",), "no test file is called so"),
        ):
            with self.subTest(argv=argv):
                done = run(*argv)
                self.assertEqual(done.returncode, 4, done.stderr)
                self.assertRegex(done.stderr, "^run_test.py: ")
                self.assertIn(said, done.stderr)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)

    def test_a_reader_that_leaves(self):
        """As `head` does."""
        receive, send = os.pipe()
        os.close(receive)
        with os.fdopen(send, "wb") as nobody:
            command = [sys.executable, ROOT / "run_test.py", "--show-config"]
            done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (3, ""))

    def test_a_file_elsewhere(self):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "test_elsewhere.py")
            file.touch()
            done = run(str(file))
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("tests are named as they are seen from there", done.stderr)


if __name__ == "__main__":
    unittest.main()
