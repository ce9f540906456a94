"""What the collector of garbage leaves out in the process of a test file, and what it does not."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kit.files import subject

from torch_testing_ext.common_utils import TestCase, run_tests

pytestmark = pytest.mark.slow

SCRIPT = subject(__file__, "frozen_garbage.py")


class TestCollector(TestCase):
    def output(self, **environment: str) -> str:
        with tempfile.TemporaryDirectory() as directory:
            script = Path(directory, "test_script.py")
            script.write_text(SCRIPT)
            command = [sys.executable, str(script)]
            done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_garbage_of_the_file_and_of_its_tests_is_collected(self):
        lines = self.output().splitlines()
        for name in ("made at import", "made by a test", "another", "left to the end"):
            self.assertEqual(lines.count(f"{name} collected"), 1, lines)
        within = lines[lines.index("collects") : lines.index("has collected")]
        self.assertIn("another collected", within)

    def test_what_the_file_has_exempted_stays_exempt(self):
        self.assertIn("left to the end collected", self.output(FREEZE="1"))


if __name__ == "__main__":
    run_tests()
