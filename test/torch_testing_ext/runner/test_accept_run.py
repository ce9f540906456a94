"""EXPECTTEST_ACCEPT with run_test.py: many processes rewrite one file, each its own lines."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kit.files import subject

from torch_testing_ext.common_utils import TestCase, run_tests

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SUBJECT = subject(__file__, "accepted_expectations.py")


class AcceptRunTest(TestCase):
    def test_each_process_rewrites_its_lines(self):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "test_accepts.py")
            file.write_text(SUBJECT)
            accepted = self.run_file(file, EXPECTTEST_ACCEPT="1")
            self.assertIn("4 passed, 0 failed", accepted)
            self.assertNotIn("wrong", file.read_text())
            for text in ("a\nb\nc", "d\ne\nf", "g\nh", "x\ny", "z\nw"):
                self.assertIn(f'({text!r}, """\\\n{text}""")'.replace("'", '"', 2), file.read_text())
            self.assertIn("4 passed, 0 failed", self.run_file(file))

    def run_file(self, file, **environ):
        words = ["-j4", "--cache", str(file.parent / "cache"), "--drop-in", str(file)]
        done = subprocess.run(
            [sys.executable, str(ROOT / "run_test.py"), *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr


if __name__ == "__main__":
    run_tests()
