"""Each row for slow and nightly tests names a test."""

import subprocess
import sys
import unittest
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
sys.path.append(str(ROOT / "test"))

from slow_rows import NIGHTLY_ROWS, OURS, SLOW_ROWS, marks_of_row  # noqa: E402

COLLECT = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "slow", "test")


class SlowRowsTest(unittest.TestCase):
    def test_by_their_whole_ids(self):
        for name, marks in {
            "distributed/properties/test_c10d_properties.py::TestCollectives::test_a": ("nightly",),
            "distributed/properties/test_fault_tolerance.py::TestRecovery::test_a": (),
            f"{OURS}test_expected_faults.py::ATest::test_kill_at_step": ("slow",),
        }.items():
            self.assertEqual(marks_of_row(f"test/{name}"), marks)

    @pytest.mark.slow
    def test_each_row_names_a_test(self):
        rows = SLOW_ROWS + NIGHTLY_ROWS
        done = subprocess.run([sys.executable, *COLLECT], cwd=ROOT, capture_output=True, text=True)
        tests = [line.removeprefix("test/") for line in done.stdout.splitlines() if "::" in line]
        self.assertGreater(len(tests), 100, done.stdout + done.stderr)
        self.assertEqual([row for row in rows if not any(fnmatchcase(test, row) for test in tests)], [])


if __name__ == "__main__":
    unittest.main()
