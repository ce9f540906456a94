"""The entry point of run_test.py: quick answers without torch, and errors without tracebacks."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
# Importing any of these takes longer than the tenth of a second in which --help should answer, or leads to it.
TOO_HEAVY = ("torch", "numpy", "rich", "asyncio", "multiprocessing", "torch_testing_ext.launch.exports")
REPORT_HEAVY = f"""
import atexit, runpy, sys
atexit.register(lambda: print("heavy:", [name for name in {TOO_HEAVY} if name in sys.modules], file=sys.stderr))
sys.argv = ["run_test.py", *sys.argv[1:]]
runpy.run_path({str(ROOT / "run_test.py")!r}, run_name="__main__")
"""


def run(*argv, command=(str(ROOT / "run_test.py"),), **more):
    return subprocess.run([sys.executable, *command, *argv], capture_output=True, text=True, check=False, **more)


class EntryPointTest(unittest.TestCase):
    def test_answers_without_torch(self):
        # For an unknown option, pytest is asked: its plugins and conftest files import what they like.
        environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
        folder = tempfile.mkdtemp()
        self.addCleanup(os.rmdir, folder)
        for argument, code in (("--help", 0), ("--no-such-option", 4), ("config", 0), ("no_such_test", 4)):
            with self.subTest(argument=argument):
                done = run(argument, command=("-c", REPORT_HEAVY), cwd=folder, env=environ)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertEqual(done.stderr.splitlines()[-1], "heavy: []")

    def test_usage_errors_have_no_traceback(self):
        for argv, said in (
            (("--shuffel",), "--shuffel is not an option. Did you mean: --shuffle"),
            (("no_such_test",), "no_such_test: no test file has this name or starts with it."),
            (("-k", "a and"), "-k 'a and': expected a part of a name, 'not' or '(', found the end"),
            (("-o", "tests=nowhere"), "nowhere does not exist; the setting `tests` names the directories to search"),
            ((sys.executable + ".py",), "no test file has this name"),
        ):
            with self.subTest(argv=argv):
                done = run(*argv)
                self.assertEqual(done.returncode, 4, done.stderr)
                self.assertRegex(done.stderr, "^run_test.py: ")
                self.assertIn(said, done.stderr)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)

    def test_a_closed_pipe(self):
        """As with `| head`."""
        receive, send = os.pipe()
        os.close(receive)
        with os.fdopen(send, "wb") as closed:
            command = [sys.executable, ROOT / "run_test.py", "config"]
            done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (3, ""))

    def test_a_file_elsewhere(self):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "test_elsewhere.py")
            file.touch()
            done = run(str(file))
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("names of tests are relative to that directory", done.stderr)


if __name__ == "__main__":
    unittest.main()
