"""`torchtest show`: the failures of the latest run, and of the tests that a name selects as it does for a run."""

import os
import unittest

from kit.files import FolderCase
from kit.invented_runs import attempt, run_events, send

from torch_testing_ext._tests import kept_failures
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import FinishedTest, Test, TestId
from torch_testing_ext.runner.options import Options, UsageError
from torch_testing_ext.runner.report import journal, journal_writer, show

IDS = [
    TestId("tests/test_prop.py", "TestProp", "test_sum"),
    TestId("tests/test_prop.py", "", "test_max[2-a::b]"),
    TestId("tests/test_other.py", "", "test_sum"),
]


class ShowTest(FolderCase):
    def setUp(self):
        super().setUp()
        self.cache = self.root / ".torch_testing_ext"
        self.at = 1_000_000

    def run_with(self, *failed):
        """A run of the runner in which these tests fail."""
        self.at += 100
        path = self.cache / "runs" / str(self.at) / journal.NAME
        path.parent.mkdir(parents=True)
        finished = [
            FinishedTest((attempt("", TestOutcome.FAILED, message=f"{test} in {self.at}", test=Test(test)),))
            for test in failed
        ]
        send(journal_writer.Journal(path, journal.header_of(Options()), self.fail), run_events(finished))
        os.utime(path, (self.at, self.at))

    def kept(self, test):
        """A run of pytest in which a test fails."""
        self.at += 100
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.root)
        kept_failures.keep_report(test, f"{test} in {self.at}")
        for file in self.cache.glob("failures/*.txt"):
            if str(self.at) in file.read_text():
                os.utime(file, (self.at, self.at))

    def shown(self, *names):
        """The first lines of what is shown: the names of tests, and the run of each."""
        runs = show.known_runs([self.cache])
        return [text.splitlines()[0] for text in show.accounts_of_failures(runs, names, self.root, self.root)]

    def test_names_are_those_of_a_run(self):
        self.run_with(*IDS)
        prop, largest, other = map(str, IDS)
        for name, expected in (
            ("test_prop.py", [prop, largest]),
            ("tests/test_prop.py", [prop, largest]),
            ("test_prop", [prop, largest]),
            ("tests", [prop, largest, other]),
            ("test_prop.py::TestProp", [prop]),
            ("tests/test_prop.py::TestProp::test_sum", [prop]),
            ("test_prop.py::test_max", [largest]),
            ("test_sum", [prop, other]),
            ("TestProp.test_sum", [prop]),
        ):
            with self.subTest(name):
                self.assertEqual(self.shown(name), expected)
        self.assertEqual(self.shown("test_prop", "test_sum"), [prop, largest, other])

    def test_the_latest_run_alone(self):
        self.run_with(*IDS[:2])
        self.kept("tests/test_gone.py::test_gone")
        self.assertEqual(self.shown(), ["tests/test_gone.py::test_gone"])
        self.run_with(IDS[2])
        self.assertEqual(self.shown(), [str(IDS[2])])
        # By its name, from a run of pytest before it.
        self.assertEqual(self.shown("test_gone.py"), ["tests/test_gone.py::test_gone"])
        self.run_with()
        self.assertEqual(self.shown(), [])

    def test_the_run_is_named(self):
        self.run_with(IDS[0])
        self.kept("tests/test_gone.py::GoneTest.test_gone")
        runs = show.known_runs([self.cache])
        texts = list(show.accounts_of_failures(runs, ["test_gone", "test_prop"], self.root, self.root))
        self.assertRegex(texts[0], r"(?s)GoneTest::test_gone\n=+\nin pytest, 1970-01-12 .*\n\n.* in 1000200\n$")
        self.assertRegex(texts[1], r"(?m)^in torchtest, 1970-01-12 ")

    def test_a_name_without_a_failure(self):
        self.run_with(IDS[0])
        with self.assertRaisesRegex(
            UsageError, r"no failure of test_none is known. In the latest run .*::test_sum failed"
        ):
            self.shown("test_none")


if __name__ == "__main__":
    unittest.main()
