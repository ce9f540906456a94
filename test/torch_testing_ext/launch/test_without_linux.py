"""What can be had where only Linux's functions are missing, as on macOS: new interpreters, and refusals in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.files import FolderCase, subject
from kit.processes import ROOT, clean_environ

from torch_testing_ext.common_utils import run_tests

SUBJECTS = Path(__file__).parent / "subjects" / "without_linux"
LINE = "these ranks are forks of this process, which needs Linux; the test classes of torch_testing_ext."


@pytest.mark.slow
class WithoutLinuxTest(FolderCase):
    def run_python(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """In a new interpreter: one of ours has been imported on Linux."""
        environ = clean_environ(PYTHONPATH=os.pathsep.join([str(SUBJECTS), str(ROOT)]))
        return subprocess.run([sys.executable, *words], cwd=self.root, env=environ, capture_output=True, text=True)

    def test_pytest(self) -> None:
        self.write("test_both.py", subject(__file__, "without_linux/ranks_of_both_kinds.py"))
        done = self.run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "test_both.py")
        self.assertIn("2 failed, 1 passed", done.stdout, done.stderr)
        self.assertRegex(done.stdout, rf"(?m)^{LINE}common_distributed start new interpreters$")
        self.assertIn("rank 1 left before all_reduce", done.stdout)
        self.assertNotIn("Traceback", done.stdout + done.stderr)

    def test_torchtest(self) -> None:
        done = self.run_python("-m", "torch_testing_ext", "test_both.py")
        self.assertEqual((done.returncode, done.stdout), (3, ""), done.stderr)
        self.assertRegex(done.stderr, r"^\S.*: torchtest forks .* needs Linux: run tests by pytest\n$")


if __name__ == "__main__":
    run_tests()
