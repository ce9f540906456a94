"""The first group that a rank makes is the first of its process: gloo counts groups in C++, which forks inherit.

`split_group` of a later default group crashes (docs/found/mended/gloo_split_of_a_second_group.py).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kit.files import subject

from torch_testing_ext.common_utils import TestCase, run_tests

pytestmark = pytest.mark.slow

# A program of its own: in a process of pytest, other files may have made groups.
PROGRAM = subject(__file__, "first_groups.py")


class TestFirstGroups(TestCase):
    def test_before_and_after_the_main_process_makes_a_group(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "test_after_a_group.py")
            file.write_text(PROGRAM)
            # The folder of this file has the link `kit`.
            path = [str(Path(__file__).parent), *sys.path]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
            done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        methods = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("method:")]
        self.assertEqual(methods, ["fork", "fork-fresh", "fork"], done.stdout)


if __name__ == "__main__":
    run_tests()
