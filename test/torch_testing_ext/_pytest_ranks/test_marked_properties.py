"""Property tests with the mark: all ranks get the same examples, beside fixtures and parameters."""

from __future__ import annotations

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

SUBJECT = subject(__file__, "properties.py")


class MarkedPropertiesTest(PytestCase):
    @pytest.mark.slow
    def test_outcomes(self) -> None:
        run = run_pytest({"test_x.py": SUBJECT})
        passed = ["test_sum[world_size=2]", "test_sum[world_size=3]", "TestPlain.test_method[1]"]
        passed += ["TestPlain.test_method[2]", "test_without_a_group", "test_shared", "test_shared_after_it"]
        passed += ["TestOwnGiven.test_method[1]", "TestOwnGiven.test_method[2]", "test_own_given_shared"]
        failed = dict.fromkeys(("test_fails", "test_own_given_fails", "test_spawned"), "failed")
        self.assertOutcomes(run, {**dict.fromkeys(passed, "passed"), **failed})
        # The smallest example, and the line of the test.
        self.assertIn("test_fails(n=17) fails on rank 1 of 2: AssertionError", run.messages["test_fails"])
        self.assertRegex(run.messages["test_fails"], r"(?m)^  rank 1  failed  test_x\.py:\d+ in test_fails$")
        self.assertIn(
            "test_own_given_fails(n=17) fails on rank 1 of 2: AssertionError", run.messages["test_own_given_fails"]
        )
        self.assertIn("in_ranks(n=50) fails on ranks 0, 1 of 2: AssertionError", run.messages["test_spawned"])

    def test_no_example_in_a_world_whose_ranks_do_not_talk(self) -> None:
        test = SUBJECT[: SUBJECT.index("@pytest.mark.world_size(2)\nclass")]
        run = run_pytest({"test_x.py": test.replace("[2, 3]", "2")}, "--simulate", "3")
        self.assertOutcomes(run, {"test_sum": "skipped"})
        self.assertIn("it draws examples, which its ranks agree on", run.messages["test_sum"])


if __name__ == "__main__":
    run_tests()
