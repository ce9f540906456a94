"""Ranks of pytest tests, of `spawn` and of a launcher under the sanitizer: by settings, by option, by decorator."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest, run_under_torchrun

from torch_testing_ext.common_utils import run_tests

COLLECTIVES = subject(__file__, "failing_collectives.py")
MARKED = subject(__file__, "sanitized_marks.py")
IN_PLACE = subject(__file__, "sanitized_bases.py")
SPAWNED = subject(__file__, "sanitized_spawn.py")
FILES = {"failing_collectives.py": COLLECTIVES, "test_x.py": MARKED, "test_y.py": SPAWNED}
BY_OP, BY_NAN = "max in call #1 of the default group", "rank 1: 4 NaN of 4 elements enter all_reduce"


class SanitizedRanksTest(PytestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    @pytest.mark.slow
    def test_decorators_without_settings(self) -> None:
        run = run_pytest(FILES)
        passed = dict.fromkeys(("test_op", "test_passes", "test_spawned_op", "test_spawned_crossed"), "passed")
        self.assertOutcomes(run, {**passed, "test_nan": "failed", "test_spawned_nan": "failed"})
        for name in ("test_nan", "test_spawned_nan"):
            self.assertIn(BY_NAN, run.messages[name])

    def test_settings(self) -> None:
        tests = ("test_x.py::test_op", "test_y.py::test_spawned_op", "test_y.py::test_spawned_crossed")
        run = run_pytest(FILES, *tests, "--sanitize", TORCH_TESTING_EXT_DELAYS="7")
        self.assertOutcomes(run, {"test_op": "failed", "test_spawned_op": "failed", "test_spawned_crossed": "passed"})
        for name in ("test_op", "test_spawned_op"):
            self.assertIn(BY_OP, run.messages[name])
            self.assertIn("max", run.messages[name])
            self.assertIn("Collectives were delayed at random, with seed 7", run.messages[name])
        # What is to be known of a test that passes is not hidden with its output.
        self.assertRegex(run.text, "RankWarning: .*issue collectives in opposite orders")

    @pytest.mark.slow
    def test_ranks_of_a_launcher(self) -> None:
        """Each decorator has its effect, and on its test only."""
        (self.folder / "failing_collectives.py").write_text(COLLECTIVES)
        run = run_under_torchrun(
            self.folder, MARKED + IN_PLACE, TORCH_TESTING_EXT_DELAYS="7", TORCH_TESTING_EXT_SANITIZE_ORDER="fail"
        )
        expected = {
            "test_op": "passed",
            "test_nan": "failed",
            "test_passes": "passed",
            "FreshTest.test_op": "passed",
            "FreshTest.test_nan": "failed",
            "FreshTest.test_passes": "passed",
            "PersistentTest.test_op": "failed",
            "PersistentTest.test_order": "failed",
            "PersistentTest.test_passes": "passed",
        }
        self.assertOutcomes(run, expected)
        for name in ("test_nan", "FreshTest.test_nan"):
            self.assertIn(BY_NAN, run.messages[name])
        self.assertIn(BY_OP, run.messages["PersistentTest.test_op"])
        self.assertIn("issue collectives in opposite orders", run.messages["PersistentTest.test_order"])
        self.assertIn("Collectives were delayed at random, with seed 7", run.messages["PersistentTest.test_op"])
        self.assertEqual([*self.folder.glob("**/*.sanitizer")], [])


if __name__ == "__main__":
    run_tests()
