"""Runs a test class of torch's own kit in a new interpreter, and tells how its test ended."""

import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

PROLOGUE = """
import os, signal, sys, unittest
import torch
from torch.testing._internal.common_distributed import MultiProcessTestCase, TEST_SKIPS
from torch.testing._internal.common_utils import run_tests
"""

# A test on two ranks; `outcome_of_ranks` gives its body.
RANKS = """
class Subject(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_it(self):
        skip = TEST_SKIPS["generic"].exit_code
        {body}
"""


def outcome_of_ranks(body: str, also: str = "") -> tuple[str, str]:
    """The outcome of a test that each of two ranks runs. `also`: more members of its class."""
    return outcome(RANKS.format(body=body) + also)


def outcome(body: str) -> tuple[str, str]:
    """("passed" | "failed" | "skipped", its output) of the one test in a file with this body."""
    with TemporaryDirectory() as directory:
        file = Path(directory, "test_subject.py")
        file.write_text(f"{PROLOGUE}\n{textwrap.dedent(body)}\n\nif __name__ == '__main__':\n    run_tests()\n")
        ran = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300, check=False)
    if "Ran 1 test" not in ran.stderr:
        raise RuntimeError(f"the file did not run one test:\n{ran.stdout}\n{ran.stderr}")
    if ran.returncode != 0:
        return "failed", ran.stderr
    return ("skipped" if "skipped=1" in ran.stderr else "passed"), ran.stderr
