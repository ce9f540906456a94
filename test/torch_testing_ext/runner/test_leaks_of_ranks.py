"""Processes that ranks leave running: each kind of rank, as the runner reports it."""

import unittest

import pytest
from kit.files import subject
from kit.runs import RunsCase

pytestmark = pytest.mark.slow

TESTS = subject(__file__, "leaks_of_ranks.py")


class LeaksOfRanksTest(RunsCase):
    def test_each_kind_of_ranks(self):
        self.write("test_it.py", TESTS)
        out = self.finish(self.start("-otests=.", "-oleaked=fail", "--results=results.json"), 1)
        leaked = "leaked"
        self.assertEqual(
            {test["id"].partition("::")[2]: test["outcome"] for test in self.results()["tests"]},
            {
                "FreshTest::test_leaves": leaked,
                "FreshTest::test_leaves_a_session": leaked,
                "FreshTest::test_helper_that_ends_with_its_rank": "passed",
                "FreshTest::test_fails_and_leaves": "failed",
                # What a lasting rank leaves is found when the rank exits, after the last test of the class.
                "LastingTest::test_1_leaves": "passed",
                "LastingTest::test_2_passes": leaked,
                "FunctionTest::test_leaves": leaked,
                "test_marked": leaked,
                "test_alone": leaked,
            },
        )
        summary = out[out.rindex("left processes running (now terminated):") :]
        for line in (
            r"FreshTest::test_leaves\n +rank 1: pid \d+: sleep 1000",
            r"test_marked\n +rank 1: pid \d+: sleep",
        ):
            self.assertRegex(summary, line)
        self.assertIn("2 passed, 7 failed, 0 skipped", summary.splitlines()[-1])


if __name__ == "__main__":
    unittest.main()
