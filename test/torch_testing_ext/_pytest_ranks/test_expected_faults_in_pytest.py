"""Faults of tests that pytest runs in ranks: by the mark and by the decorator."""

import unittest

import pytest
from kit.files import subject
from kit.pytest_runs import run_pytest

from torch_testing_ext.common_utils import run_tests

pytestmark = pytest.mark.slow

SUBJECT = subject(__file__, "expected_faults.py")
FAILED = {
    "test_sweep_of_shared_ranks": "2 of 2 faults fail this test; the first: kill(rank=0, at=call(1)) at barrier #1: ",
    "test_never": "kill(rank=1, at=call(5)) did not happen: rank 1 came to 1 collective call (in all: 1 barrier)",
    "TestShared.test_restart": "restart(1) needs ranks of its own for each test: use MultiProcessTestCase, or the "
    "scope 'function'",
    "test_no_such_rank": "the test has 2 ranks; give a rank from 0 to 1",
    "test_two_marks": "the test has faults twice. Give all of them to one mark faults, or to one decorator",
    "test_mark_and_decorator": "the test has faults twice. Give all of them to one mark faults, or to one decorator",
    "test_no_point": "say which rank and where: kill(..., rank=1, at=call(3))",
    "test_no_ranks": "it has faults, but no ranks of the plugin. Mark it: @pytest.mark.world_size(2)",
    "test_no_ranks_by_the_decorator": "does not run in ranks that can die",
}


class FaultsInPytestTest(unittest.TestCase):
    def test_marks_and_decorators(self):
        run = run_pytest({"test_faults.py": SUBJECT})
        failed = {name for name, outcome in run.outcomes.items() if outcome != "passed"}
        self.assertEqual({name.rpartition("::")[2] for name in failed}, set(FAILED), run.text)
        for name, text in FAILED.items():
            with self.subTest(name=name):
                self.assertIn(text, run.messages[name])
        self.assertEqual(len(run.outcomes), 16)


if __name__ == "__main__":
    run_tests()
