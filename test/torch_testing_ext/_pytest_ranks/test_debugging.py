"""--pdb and --trace with a rank that has the terminal, on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
import unittest
from contextlib import suppress
from pathlib import Path

import pytest
from kit.processes import clean_environ
from kit.pytest_runs import PLUGIN, run_pytest

from torch_testing_ext.common_utils import run_tests

SUBJECT = """
import os, pytest

@pytest.mark.world_size(2)
def test_fails():
    seen = f"in rank {os.environ['RANK']}"
    assert seen == "", "wrong"

@pytest.mark.world_size(2)
def test_passes():
    seen = f"in rank {os.environ['RANK']}"
"""


@unittest.skipUnless(hasattr(os, "fork"), "needs a terminal of Unix")
class DebuggingTest(unittest.TestCase):
    def on_terminal(self, typed: str, *words: str) -> str:
        """What pytest shows on a terminal on which this is typed."""
        ours, theirs = pty.openpty()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_subject.py").write_text(SUBJECT)
            command = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "-q", *words]
            os.write(ours, typed.encode())
            streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
            process = subprocess.Popen(command, cwd=folder, env=clean_environ(), start_new_session=True, **streams)
            os.close(theirs)
            text = b""
            with suppress(OSError):  # when no process has the terminal any more
                while data := os.read(ours, 1 << 16):
                    text += data
            process.wait()
        os.close(ours)
        return text.decode()

    @pytest.mark.slow
    def test_pdb(self) -> None:
        text = self.on_terminal("p seen + '!'\nq\n", "--pdb", "--debug-rank=1")
        self.assertIn("'in rank 1!'", text)
        self.assertEqual(text.count("entering PDB"), 1, text)  # not again at the verdict
        self.assertIn("ranks 0, 1  failed  test_subject.py:", text)
        self.assertRegex(text, r"Quitting debugger|quit the debugger")
        self.assertNotIn("passed", text)  # the command ends the session

    @pytest.mark.slow
    def test_trace(self) -> None:
        text = self.on_terminal("n\np seen + '!'\nc\n", "--trace", "test_subject.py::test_passes")
        self.assertIn("'in rank 0!'", text)
        self.assertIn("1 passed", text)

    @pytest.mark.slow
    def test_in_a_whole_world(self) -> None:
        text = self.on_terminal("p seen + '!'\nq\n", "--pdb", "--debug-rank=2", "--simulate=3")
        self.assertIn("'in rank 2!'", text)
        self.assertIn("ranks 0-2  failed  test_subject.py:", text)

    def test_help_and_mistakes(self) -> None:
        run = run_pytest({}, "--markers")
        self.assertRegex(
            run.text,
            r"@pytest.mark.world_size\(size, \*, backend=None, .*isolated=False, .*scope=.function., nodes=1\): run",
        )
        run = run_pytest({"test_subject.py": SUBJECT}, "--debug-rank=-1")
        self.assertEqual(run.code, 4)
        self.assertIn("--debug-rank", run.errors)


if __name__ == "__main__":
    run_tests()
