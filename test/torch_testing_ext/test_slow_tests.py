"""The list of slow tests names tests that exist."""

import ast
import os
import subprocess
import sys
import unittest
from fnmatch import fnmatchcase
from pathlib import Path

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
sys.path.append(str(ROOT / "test"))

from slow_tests import SLOW, is_slow  # noqa: E402

ROWS = [row for rows in SLOW.values() for row in rows]
COLLECT = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "slow")


def names_defined(file):
    """The classes of a file with the names of their tests."""
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    return {
        each.name: [node.name for node in each.body if isinstance(node, ast.FunctionDef) and "test" in node.name]
        for each in classes
    }


def may_match(pattern, name):
    """Whether a pattern may match a test of this name, or one that a table makes of it."""
    known = pattern.partition("*")[0]
    return known.startswith(name) or name.startswith(known)


class SlowTestsTest(unittest.TestCase):
    def test_rows_name_what_exists(self):
        for row in ROWS:
            with self.subTest(row=row):
                files, cls, *test = row.split("::")
                tests = [
                    name
                    for file in (ROOT / "test").glob(files.replace("/*", "/**/*"))
                    for owner, names in names_defined(file).items()
                    for name in names
                    if may_match(cls, owner) and may_match(test[0] if test else "*", name)
                ]
                self.assertTrue(tests)

    def test_no_row_twice(self):
        self.assertEqual(len(ROWS), len(set(ROWS)))

    def test_by_their_whole_ids(self):
        self.assertTrue(is_slow("test/torch_testing_ext/launch/test_soak.py::SoakTest::test_nothing_accumulates"))
        self.assertTrue(is_slow("test/distributed/properties/test_c10d_properties.py::TestCollectives::test_a"))
        self.assertFalse(is_slow("test/torch_testing_ext/launch/test_verdict.py::TestVerdict::test_a"))
        self.assertFalse(is_slow("test/torch_testing_ext/launch/test_soak_more.py::SoakTest::test_a"))

    def test_each_row_matches_a_test(self):
        """All tests are collected for this, which is slow itself."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run([sys.executable, *COLLECT], cwd=ROOT, env=environ, capture_output=True, text=True)
        found = [line.removeprefix("test/") for line in done.stdout.splitlines() if "::" in line]
        self.assertGreater(len(found), 100, done.stdout + done.stderr)
        self.assertEqual([row for row in ROWS if not any(fnmatchcase(test, row) for test in found)], [])


if __name__ == "__main__":
    unittest.main()
