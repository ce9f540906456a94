"""The types of the public names, as a project that checks its types strictly sees them."""

import subprocess
import sys

import pytest
from kit.files import FolderCase, subject
from kit.processes import ROOT, clean_environ

from torch_testing_ext.common_utils import run_tests


class PublicTypesTest(FolderCase):
    @pytest.mark.slow
    def test_a_strict_project(self) -> None:
        """In another interpreter, away from the settings of this project."""
        self.write("tests/test_typed.py", subject(__file__, "typed_tests.py"))
        self.write("pyproject.toml", "[tool.mypy]\nstrict = true\nfiles = ['tests']\n")
        done = self.mypy()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.write(
            "tests/test_typed.py", subject(__file__, "typed_tests.py").replace("dist_env.rank +", "dist_env.rnk +")
        )
        self.assertIn('"DistEnv" has no attribute "rnk"', self.mypy().stdout)

    def mypy(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mypy", "--cache-dir", str(self.root / "cache")]
        # mypy does not follow the finder of an editable installation.
        environ = clean_environ(MYPYPATH=str(ROOT))
        return subprocess.run(command, cwd=self.root, env=environ, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    run_tests()
