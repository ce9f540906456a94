"""Fixtures that know their rank, functions of a project that make the group, and launcher variables at collection."""

from __future__ import annotations

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

pytestmark = pytest.mark.slow

SUBJECT = subject(__file__, "rank_fixtures.py")


class RankFixturesTest(PytestCase):
    def test_every_outcome(self) -> None:
        run = run_pytest({"test_x.py": SUBJECT})
        failed = {
            "test_init_makes_none": ("failed", "print, the init of the mark, made no process group"),
            "test_bad_init": ("error", "init is 'gloo'; it must be a function that makes the process group"),
            "test_too_many": ("error", "at most 1024 are possible: each rank is a process on this machine"),
        }
        for name, (outcome, text) in failed.items():
            self.assertEqual(run.outcomes.pop(name), outcome, run.text)
            self.assertIn(text, run.messages[name])
        passed = ["test_marked", "TestWithout.test_without_group", "test_unmarked", "TestOwnNames.test_unmarked"]
        passed += ["TestOwnNames.test_marked_without", "TestExtended.test_marked_without", "test_init"]
        self.assertOutcomes(run, dict.fromkeys([*passed, "test_init_with_the_rank"], "passed"))


if __name__ == "__main__":
    run_tests()
