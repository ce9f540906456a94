"""Bugs that we found in torch, kept in docs/found: they still exist.

If torch has fixed one, add the version to `kit/found_bugs.py`, and make the exceptions for it in the suites end there.
In a version that we know, its test fails until then; in a newer one, which we have not looked at yet, a warning says
so.
"""

import runpy
import sys

import torch
from kit.found_bugs import (
    ALL,
    FIXED,
    FIXED_IN,
    FOUND,
    RAISED_BEFORE,
    WRONG_SINCE,
    imports_of,
    page,
    repaired,
    table,
)
from kit.ranks import OneRank

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests


class TestFound(OneRank):
    """Each file runs in a rank that has imported torch already, and forks the other ranks that it needs."""

    def test_every_file_is_listed(self):
        """The pages of faults that the newest torch has mended are in the folder `mended`."""
        self.assertEqual(set(FOUND.rglob("*.py")), {page(name) for name in FIXED_IN})

    def test_readme_has_each_file_with_its_versions_and_issues(self):
        readme = (FOUND / "README.md").read_text(encoding="utf-8")
        for are_mended in (False, True):
            rows = table(name for name in FIXED_IN if bool(FIXED_IN[name]) == are_mended)
            self.assertIn(rows, readme, "renew the table")

    def test_every_file_needs_torch_alone(self):
        for file in FOUND.rglob("*.py"):
            with self.subTest(file.name):
                self.assertLessEqual(imports_of(file.read_text(encoding="utf-8")) - sys.stdlib_module_names, {"torch"})

    def test_suites_leave_a_fault_out_in_its_versions(self):
        """The tables of the suites have the versions of the pages."""
        from dtensor_opinfo_support import KNOWN_FAULTS
        from dtensor_ops_support import WRONG

        for entry in (*KNOWN_FAULTS, *WRONG):
            name = getattr(entry, "page", None) or entry.message
            since, until = entry.versions
            with self.subTest(name):
                self.assertEqual(None if until == ALL[1] else until, FIXED_IN[name])
                self.assertEqual(None if since == ALL[0] else since, WRONG_SINCE.get(name))

    @parametrize("name", sorted(set(FIXED_IN) - set(FIXED)))
    def test_is_wrong(self, name):
        if self.is_right(name):
            repaired(f"has not the bug of docs/found/{name}.py: list it in FIXED_IN, and move it to docs/found/mended")

    @parametrize("name", sorted(FIXED))
    def test_is_fixed(self, name):
        self.assertTrue(self.is_right(name), "torch is still wrong")

    def is_right(self, name):
        """Run a file as a program: its exit code tells whether torch is right."""
        try:
            runpy.run_path(str(page(name)), run_name="__main__")
        except SystemExit as exit_request:
            return not exit_request.code
        except RuntimeError:
            if torch.__version__ >= RAISED_BEFORE.get(name, (0, 0)):
                raise
            # torch has not got so far as to be wrong.
            return name in FIXED
        return True


instantiate_parametrized_tests(TestFound)

if __name__ == "__main__":
    run_tests()
