"""What the collector of garbage leaves out in the process of a test file, and what it does not."""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from torch_testing_ext.common_utils import TestCase, run_tests

SCRIPT = """
import gc, os, sys
import torch
if "FREEZE" in os.environ:
    gc.freeze()
frozen = gc.get_freeze_count()
from torch_testing_ext.common_utils import TestCase, run_tests
assert bool(gc.get_freeze_count()) == bool(frozen)  # some of them may have gone
assert gc.isenabled()

class InACycle:
    def __init__(self, name):
        self.name, self.itself = name, self

    def __del__(self):
        os.write(1, (self.name + " collected\\n").encode())

InACycle("made at import")

class TestGarbage(TestCase):
    def test_a_made(self):
        self.kept = torch.ones(3)
        self.assertTrue(any(one is self for one in gc.get_objects()))
        self.assertTrue(gc.is_tracked(self))
        InACycle("made by a test")

    def test_b_collected_by_the_test(self):
        InACycle("another")
        os.write(1, b"collects\\n")
        gc.collect()
        os.write(1, b"has collected\\n")
        InACycle("left to the end")

if __name__ == "__main__":
    run_tests()
"""


class TestCollector(TestCase):
    def output(self, **environment: str) -> str:
        with tempfile.TemporaryDirectory() as directory:
            script = Path(directory, "test_script.py")
            script.write_text(textwrap.dedent(SCRIPT))
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
