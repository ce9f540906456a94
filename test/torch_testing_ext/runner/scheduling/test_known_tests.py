"""`--list` and `--last-failed` without an import of what is known, and every reason to import again."""

import os
import unittest
from unittest import mock

import pytest
from kit.runs import RunsCase

from torch_testing_ext._process import file_reads
from torch_testing_ext.runner.model import Test, TestId
from torch_testing_ext.runner.options.sources import read_options
from torch_testing_ext.runner.scheduling.affected_tests import Affected
from torch_testing_ext.runner.scheduling.earlier_runs import EarlierRuns

TESTS = """
import os
import unittest
import helper
open(".imported", "a").write(os.path.basename(__file__) + chr(10))

class OneTest(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self): self.fail("on purpose")
    {more}
"""


class KnownTestsTest(RunsCase):
    def setUp(self):
        super().setUp()
        for name in ("test_a", "test_b"):
            self.write(f"tests/{name}.py", TESTS.format(more=""))
        self.write("tests/helper.py", "")
        self.write("tests/test_c.py", "import unittest\nclass CTest(unittest.TestCase):\n    def test_c(self): pass\n")

    def imported(self):
        """The files that were imported since the last call."""
        file = self.root / ".imported"
        names = file.read_text().split() if file.exists() else []
        file.unlink(missing_ok=True)
        return sorted(name.removesuffix(".py") for name in names)

    def listed(self, *argv):
        out = self.finish(self.start("--list", *argv), 0, 1)
        return [line.rpartition("/")[2].split("  ")[0] for line in out.splitlines()[:-1]]

    @pytest.mark.slow
    def test_a_project(self):
        everything = [f"test_{file}.py::OneTest::test_{test}" for file in "ab" for test in ("good", "bad")]
        everything.append("test_c.py::CTest::test_c")
        self.assertEqual(self.listed(), everything)
        self.assertEqual(self.imported(), ["test_a", "test_b"])
        self.assertEqual(self.listed(), everything)
        self.assertEqual(self.listed("test_b.py", "-k", "bad"), everything[3:4])
        self.assertEqual(self.imported(), [], "all of it was known")
        self.write("tests/test_b.py", TESTS.format(more="def test_new(self): pass"))
        self.assertIn("test_b.py::OneTest::test_new", self.listed())
        self.imported()

        self.finish(self.start("-o", "exclude=test_b"), 1)
        self.imported()
        failed = ["test_a.py::OneTest::test_bad"]
        self.assertEqual(self.listed("--last-failed"), failed)
        self.assertEqual(self.imported(), [])
        out = self.finish(self.start("--last-failed"), 1)
        self.assertIn("0 passed, 1 failed, 0 skipped", out)
        self.assertEqual(self.imported(), ["test_a"], "no other file has a test that failed")
        self.write("tests/test_a.py", TESTS.format(more="").replace("test_bad", "test_other"))
        out = self.finish(self.start("--last-failed"), 1)
        self.assertIn("none of the selected tests failed in its last run", out)
        self.assertIn("4 passed, 2 failed", out)

    def test_a_change_of_anything_that_is_read(self):
        tests = [Test(TestId(f"tests/test_{file}.py", "OneTest", "test_good"), world_size=4) for file in "ac"]
        files = ("tests/test_a.py", "tests/test_c.py")

        def cache(*argv, **environ):
            with mock.patch.dict(os.environ, environ):
                options = read_options(argv, {}, self.root, self.root).options
                return Affected(options, self.root, EarlierRuns(options))

        def record(known):
            read = ["tests/helper.py", "tests/test_base.py"]
            reads = {
                TestId(file): {str(self.root / one): file_reads.hash_of(str(self.root / one)) for one in (file, *read)}
                for file in files
            }
            cache().record(reads, known)

        def known(*argv, **environ):
            return cache(*argv, **environ).unchanged_tests(files)

        self.assertIsNone(known())
        changes = {
            "the file": lambda: self.write("tests/test_a.py", "pass"),
            "a test file that it imports": lambda: self.write("tests/test_base.py", "y = 3"),
            "a module that it imports": lambda: self.write("tests/helper.py", "x = 3"),
            "a new conftest.py": lambda: self.write("tests/conftest.py", ""),
            "that of a folder above": lambda: self.write("conftest.py", ""),
            "pytest's settings": lambda: self.write("pytest.ini", "[pytest]\n"),
            "a file that is gone": lambda: (self.root / "tests/test_c.py").unlink(),
        }
        for change, make in changes.items():
            with self.subTest(change=change):
                record(tests)
                self.assertEqual(known(), tuple(tests))
                self.assertIsNone(known("--fake-accelerators", "4"))
                self.assertIsNone(known(MY_TESTS_READ="it"))
                make()
                self.assertIsNone(known())
        for broken in Test(TestId(files[1])), Test(TestId(files[1], "OneTest", "test_bad"), marks=None):
            record([tests[0], broken])
            self.assertIsNone(known(), "what cannot be imported, or run, is not known")
            self.assertEqual(cache().unchanged_tests(files[:1]), (tests[0],))


if __name__ == "__main__":
    unittest.main()
