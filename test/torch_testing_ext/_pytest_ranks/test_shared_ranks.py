"""Ranks that the tests of a class or module share, by `scope` in the mark."""

from __future__ import annotations

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

SUBJECT = subject(__file__, "shared_ranks.py")
REFUSED = subject(__file__, "refused_sharing.py")


class SharedRanksTest(PytestCase):
    @pytest.mark.slow
    def test_outcomes(self) -> None:
        # In a new interpreter, which decides by the locale how it encodes text.
        run = run_pytest({"test_x.py": SUBJECT}, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", cold=True)
        passed = ["test_a[1]", "test_a[2]", "TestC.test_c", "TestC.test_d", "test_one_process", "test_renewed"]
        passed += [
            "test_of_each_its_own[one]",
            r"test_of_each_its_own[zw\xf6lf]",
            "test_fresh",
            "TestOfUnittest.test_u",
            "TestOfUnittest.test_v",
        ]
        others = {"test_fails": "failed", "test_dies": "failed", "test_strict": "failed", "test_skipped": "skipped"}
        others |= {"test_skips_itself": "skipped", "test_expected": "xfail", "test_last": "error"}
        self.assertOutcomes(run, {**dict.fromkeys(passed, "passed"), **others})
        self.assertIn("at the end", run.messages["test_last"])
        for number in (1, 2):
            for text in (f"printed by a {number}", f"logged by a {number}"):
                self.assertEqual(run.outputs[f"test_a[{number}]"].count(text), 2, text)

    def test_refused(self) -> None:
        run = run_pytest({"test_x.py": REFUSED})
        self.assertOutcomes(run, dict.fromkeys(("test_too_wide", "test_unknown", "test_isolated"), "error"))
        wide = "exists only in the ranks of one class. Give the fixture scope 'class', or the mark scope='module'"
        self.assertIn(wide, run.messages["test_too_wide"])
        self.assertIn("scope is 'session'; it must be one of function, class, module", run.messages["test_unknown"])
        self.assertIn("isolated=True starts new ranks for each test", run.messages["test_isolated"])


if __name__ == "__main__":
    run_tests()
