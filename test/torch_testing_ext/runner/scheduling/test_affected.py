"""`--affected` and the command `why`: by the files that tests, ranks and fixtures have read."""

import dataclasses
import os
import subprocess
import unittest
from unittest import mock

import pytest
from kit.files import subject
from kit.runs import RunsCase
from kit.warm import run_warm

from torch_testing_ext._machine import fake_accelerator
from torch_testing_ext._machine.device_locks import LEASE_FOLDER
from torch_testing_ext._process import file_reads
from torch_testing_ext.runner.model import Test, TestId
from torch_testing_ext.runner.options import UsageError
from torch_testing_ext.runner.options.sources import read_options
from torch_testing_ext.runner.scheduling.affected_tests import Affected
from torch_testing_ext.runner.scheduling.earlier_runs import EarlierRuns

RANKS = subject(__file__, "affected_ranks.py")
PLAIN = subject(__file__, "affected_plain.py")
READS = subject(__file__, "reading_program.py")

LOOKS_FOR_LIBRARIES = """
import ctypes.util, subprocess, sys
from torch_testing_ext._process import file_reads
file_reads.begin(sys.argv[1])
subprocess.run(["/sbin/ldconfig", "-p"], stdout=subprocess.DEVNULL)
assert ctypes.util.find_library("c")
ctypes.util.find_library("no_such_library")
subprocess.run(["true"])
"""


def git(folder, *words):
    who = ("-c", "user.name=n", "-c", "user.email=e@x")
    subprocess.run(["git", "-C", folder, *who, *words], check=True, stdout=subprocess.DEVNULL)


class FileReadsTest(RunsCase):
    def test_what_a_process_and_its_forks_read(self):
        for name in ("a.txt", "b.txt", "in_child.txt", "data/x", "module.py"):
            self.write(name, name)
        self.write("module.py", "")
        self.write("program.py", READS)
        before = file_reads.hash_of(str(self.root / "data*"))
        for _ in range(2):  # the second time, the module is read from its compiled file
            done = run_warm("program.py", "record", cwd=self.root, env={**os.environ})
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            found = file_reads.read_record(self.root / "record")
            (self.root / "record").unlink()
            names = {path.removeprefix(f"{self.root}/") for path in found if path.startswith((str(self.root), "!"))}
            program = next(name for name in names if name.startswith("!"))
            self.assertIn("python", program)
            names -= {program, "", f"{self.root}?", f"{self.root}*"}
            self.assertEqual(names, {"a.txt", "absent.txt", "b.txt", "in_child.txt", "data*", "module.py"})
            self.assertEqual(found[f"{self.root}/absent.txt"], "")
            self.assertEqual(found[f"{self.root}/data*"], before)
        self.write("data/y", "")
        self.assertNotEqual(file_reads.hash_of(str(self.root / "data*")), before)
        self.assertEqual(file_reads.hash_of(str(self.root / "data?")), file_reads.hash_of(str(self.root / "data?")))
        self.assertIsNone(file_reads.read_record(self.root / "record"), "none is kept that is not whole")

    def test_programs_that_look_for_libraries(self):
        """torch's CUDA builds start them when they are imported: they read nothing of the project."""
        self.write("program.py", LOOKS_FOR_LIBRARIES)
        done = run_warm("program.py", "record", cwd=self.root, env={**os.environ})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        found = file_reads.read_record(self.root / "record")
        self.assertEqual([name for name in found if name.startswith("!")], ["!true"])


class RecordsTest(RunsCase):
    """The records, by what was read."""

    def setUp(self):
        super().setUp()
        for name in ("test_a.py", "shared.py", "own.txt"):
            self.write(name, name)
        self.test = TestId("test_a.py", "T", "test_x")
        self.watch = True

    def affected(self, *argv, **environ):
        with mock.patch.dict(os.environ, environ):
            options = read_options(argv, {}, self.root, self.root).options
            options = dataclasses.replace(options, watch=self.watch)
            self.earlier = EarlierRuns(options)
            return Affected(options, self.root, self.earlier)

    def hashes(self, *names):
        return {str(self.root / name): file_reads.hash_of(str(self.root / name)) for name in names}

    def record(self, tests=None):
        reads = {TestId("test_a.py"): self.hashes("test_a.py", "shared.py"), self.test: self.hashes("own.txt")}
        self.affected().record(reads, map(Test, tests or [self.test]), [self.test])

    def why(self, *argv, **environ):
        affected = self.affected(*argv, **environ)
        why = affected.why(self.test)
        self.assertEqual(affected.file_is("test_a.py"), why is not None)
        return why or ""

    def test_every_doubt_selects(self):
        self.assertIn("no record", self.why())
        changes = {
            "shared.py has changed": lambda: self.write("shared.py", "other"),
            "own.txt has changed": lambda: (self.root / "own.txt").unlink(),
            "conftest.py has changed": lambda: self.write("conftest.py", ""),
            "pytest.ini has changed": lambda: self.write("pytest.ini", "[pytest]"),
        }
        for expected, change in changes.items():
            with self.subTest(expected):
                self.record()
                self.assertEqual(self.why(), "")
                # Those of a run with fake accelerators are others each time.
                self.assertEqual(self.why(**{fake_accelerator.MEMORY_FILE: "/1", LEASE_FOLDER: "/1"}), "")
                self.assertIn("environment", self.why(MY_VARIABLE="1"))
                self.assertIn("options", self.why("--fake-accelerators", "2"))
                change()
                self.assertIn(expected, self.why())
        self.record()
        other = TestId("test_a.py", "T", "test_new")
        self.assertIn("no record", self.affected().why(other))
        self.record(tests=[self.test, other])
        self.assertTrue(self.affected().file_is("test_a.py"), "one of its tests has not run")
        self.write("shared.py", "changed again")
        self.affected().record({TestId("test_a.py"): self.hashes("shared.py")}, [Test(self.test)])
        self.assertIn("imports other modules", self.why())
        self.record()
        with mock.patch.dict(os.environ, MY_VARIABLE="1"):
            listed = {TestId("test_a.py"): self.hashes("test_a.py", "shared.py")}
            self.affected().record(listed, [Test(self.test)])  # as `--list` does
            self.assertIn("another environment", self.why())
        self.affected().record({TestId("test_a.py"): None}, [Test(self.test)], [self.test])
        self.assertIn("no record", self.why())
        self.record()
        place = next((self.root / ".torch_testing_ext/reads").glob("*.json"))
        place.write_text("{")
        self.assertIn("no record", self.why())
        self.assertEqual(len(self.earlier.warnings), 1)

    def test_git(self):
        self.watch = False
        self.record()
        self.assertIn("git cannot say", self.why())
        self.assertIn("has changed: fatal: not a git repository", self.earlier.warnings[0])
        self.assertEqual(len(self.earlier.warnings), 1)

        git(self.root, "init", "-q", "-b", "trunk")
        self.assertIn("git cannot say", self.why(), "there is no commit yet")
        self.write(".gitignore", "tmp\n.torch_testing_ext\nown.txt\n")
        git(self.root, "add", ".")
        git(self.root, "commit", "-qm", "first")
        self.assertEqual(self.why(), "")
        self.write("own.txt", "which git ignores")
        self.assertIn("own.txt has changed since its last run", self.why())
        self.record()
        self.write("shared.py", "not committed")
        self.record()
        self.assertIn("shared.py differs from the last commit", self.why())
        git(self.root, "checkout", "-qb", "branch")
        git(self.root, "commit", "-qam", "second")
        self.assertEqual(self.why(), "")
        self.assertIn("shared.py differs from trunk", self.why("--affected=trunk"))
        self.assertEqual(self.why("--affected=branch"), "")
        for revision in ("nosuch", "--output=x"):
            with self.subTest(revision), self.assertRaisesRegex(UsageError, "git knows no such commit"):
                self.why(f"--affected={revision}")


@pytest.mark.slow
class AffectedRunsTest(RunsCase):
    def setUp(self):
        super().setUp()
        self.write("tests/test_ranks.py", RANKS)
        self.write("tests/test_plain.py", PLAIN)
        for name in ("fixture.txt", "shared.py", "of_ranks.py", "unread.py"):
            self.write(f"tests/{name}", "")
        self.write("tests/rank1.json", "1")
        git(self.root, "init", "-q")
        self.write(".gitignore", "*")
        self.write("committed", "")
        git(self.root, "add", "-f", "committed")
        git(self.root, "commit", "-qm", "first")

    def ran(self, *codes):
        self.finish(self.start("--affected", "--results=results.json"), *codes)
        return set(self.outcomes())

    def test_a_project(self):
        everything = {"test_in_ranks", "test_plain", "test_program"}
        self.assertEqual(self.ran(0), everything)
        self.assertEqual(self.ran(0), {"test_program"}, "whose reads are unknown")
        for name, text, code in (
            ("fixture.txt", "x", 0),
            ("rank1.json", "2", 1),
            ("shared.py", "raise ValueError", 1),
            ("shared.py", "", 1),
        ):
            with self.subTest(name, text=text):
                self.write(f"tests/{name}", text)
                ran = self.ran(code) - {"test_program"}
                self.assertEqual(len(ran), 1)
                self.assertTrue(ran <= {"test_in_ranks", "tests/test_ranks.py"}, ran)
        self.write("tests/rank1.json", "1")
        self.write("tests/of_ranks.py", "x = 1")
        self.assertEqual(self.ran(0), {"test_in_ranks", "test_program"})
        self.write("tests/unread.py", "x = 1")
        self.assertEqual(self.ran(0), {"test_program"})
        self.finish(self.start("why", "tests/test_ranks.py", "test_program"), 4)
        self.assertIn("no test file has this name", self.stderr)
        why = self.finish(self.start("why", "test_ranks", "test_plain.py::test_program"), 0)
        self.assertIn("test_in_ranks: not selected: none of the", why)
        self.assertIn("test_program: selected: it starts", why)
        out = self.finish(self.start("--affected", "test_ranks"), 0)
        self.assertIn("no test is affected", out)


if __name__ == "__main__":
    unittest.main()
