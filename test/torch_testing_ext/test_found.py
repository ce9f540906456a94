"""Bugs that we found in torch, kept in docs/found: they still exist.

If torch has fixed one, add the version to `kit/found_bugs.py`, and make the exceptions for it in the suites end there.
In a version that we know, its test fails until then; in a newer one, which we have not looked at yet, a warning says
so.
"""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.found_bugs import ALL, ALONE, FIXED, FIXED_IN, NOT_JUDGED, RAISED_BEFORE, WRONG_SINCE, imports_of, repaired
from kit.ranks import OneRank

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests, timeout

FOUND = Path(__file__).parents[2] / "docs" / "found"


class TestFound(OneRank):
    """Each file runs in a rank that has imported torch already, and forks the other ranks that it needs."""

    def test_every_file_is_listed(self):
        self.assertEqual({file.stem for file in FOUND.glob("*.py")} - NOT_JUDGED, set(FIXED_IN))

    def test_every_file_needs_torch_alone(self):
        for file in FOUND.glob("*.py"):
            with self.subTest(file.name):
                self.assertLessEqual(imports_of(file.read_text(encoding="utf-8")) - sys.stdlib_module_names, {"torch"})

    def test_suites_leave_a_fault_out_in_its_versions(self):
        """The tables of the suites have the versions of the pages."""
        from dtensor_opinfo_support import KNOWN_FAULTS
        from dtensor_ops_support import WRONG

        for entry in (*KNOWN_FAULTS, *WRONG):
            page = getattr(entry, "page", None) or entry.message
            since, until = entry.versions
            with self.subTest(page):
                self.assertEqual(None if until == ALL[1] else until, FIXED_IN[page])
                self.assertEqual(None if since == ALL[0] else since, WRONG_SINCE.get(page))

    @parametrize("name", sorted(set(FIXED_IN) - set(FIXED)))
    def test_is_wrong(self, name):
        if self.is_right(name):
            repaired(f"has not the bug of docs/found/{name}.py: list it in FIXED_IN")

    @parametrize("name", sorted(FIXED))
    def test_is_fixed(self, name):
        self.assertTrue(self.is_right(name), "torch is still wrong")

    @pytest.mark.slow
    @timeout(300)
    def test_gloo_abort_at_exit_runs(self):
        command = [sys.executable, FOUND / "gloo_abort_at_exit.py", "1"]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=280).stdout
        self.assertRegex(output, r"pause of 0 s: [01] of 1 aborted\npause of 0.002 s: [01] of 1 aborted\n")

    def is_right(self, name):
        """Run a file as a program: its exit code tells whether torch is right."""
        if name in ALONE:
            return subprocess.run([sys.executable, FOUND / f"{name}.py"], timeout=280).returncode == 0
        try:
            runpy.run_path(str(FOUND / f"{name}.py"), run_name="__main__")
        except SystemExit as exit_request:
            return not exit_request.code
        except RuntimeError:
            if torch.__version__ >= RAISED_BEFORE.get(name, (0, 0)):
                raise
            return False
        return True


instantiate_parametrized_tests(TestFound)

if __name__ == "__main__":
    run_tests()
