"""A run with workers fails if something is left in its temporary folder, and names the test."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
CONFTEST = f"""
import sys
sys.path.append({str(ROOT / "test")!r})
from temporary_folder import use_own_folder
import temporary_folder
temporary_folder.PATIENCE = 1.0

def pytest_configure(config):
    use_own_folder(config)
"""
LEAVES = """
import atexit, os, shutil, tempfile

def test_cleans():
    tempfile.TemporaryDirectory(prefix="cleaned_").cleanup()

def test_cleans_at_exit():
    atexit.register(shutil.rmtree, tempfile.mkdtemp(prefix="at_exit_"))

def test_own_folder():
    assert os.environ["TMPDIR"] == tempfile.gettempdir()
"""


class LeftTest(unittest.TestCase):
    def ran(self, source, *options):
        """Run pytest on this source: its exit code, what it printed, and what is in the temporary folder then."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "conftest.py").write_text(CONFTEST)
            Path(folder, "test_it.py").write_text(source)
            temporary = Path(folder, "temporary")
            temporary.mkdir()
            environ = {name: value for name, value in os.environ.items() if name != "PYTEST_DEBUG_TEMPROOT"}
            environ |= {"TMPDIR": str(temporary)}
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_it.py"],
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                text=True,
            )
            # Kept on purpose.
            left = [name for name in os.listdir(temporary) if not name.startswith(("pytest-of-", "torchinductor_"))]
        return done.returncode, done.stdout, left

    @pytest.mark.slow
    def test_nothing_is_left(self):
        code, text, left = self.ran(LEAVES, "-n", "1")
        self.assertEqual((code, left), (0, []), text)
        self.assertNotIn("left in the temporary folder", text)

    @pytest.mark.slow
    def test_something_is_left(self):
        leaves = "folder = tempfile.mkdtemp(prefix='torch_testing_ext_'); os.mkdir(folder + '/inside')"
        code, text, left = self.ran(f"{LEAVES}\ndef test_leaves():\n    {leaves}\n", "-n", "1")
        self.assertEqual((code, left), (1, []), text)
        line = r"torch_testing_ext_\w+: first seen after test_it.py::test_leaves, with inside"
        self.assertRegex(text, rf"(?m)^{line}\n4 passed")
        self.assertNotIn("at_exit_", text)

    @pytest.mark.slow
    def test_what_others_leave_is_no_failure(self):
        code, text, left = self.ran(
            f"{LEAVES}\ndef test_leaves():\n    tempfile.mkdtemp(prefix='of_others_')\n", "-n", "1"
        )
        self.assertEqual((code, left), (0, []), text)
        self.assertRegex(text, r"(?m)^of_others_\w+: first seen after test_it.py::test_leaves$")

    def test_without_workers_the_folder_is_the_usual_one(self):
        code, text, left = self.ran("import tempfile\ndef test_leaves():\n    tempfile.mkdtemp(prefix='kept_')\n")
        self.assertEqual((code, len(left)), (0, 1), text)


if __name__ == "__main__":
    unittest.main()
