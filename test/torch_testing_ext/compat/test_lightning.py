"""Lightning's `RunIf(standalone=True)`, with the plugin that takes it for the mark `standalone`."""

from __future__ import annotations

from kit.pytest_runs import PLUGIN, PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

SOURCE = """
import os
import pytest

asked = os.environ.get("PL_RUN_STANDALONE_TESTS") == "1"
IS_PARENT = "PARENT_OF_TESTS" not in os.environ
os.environ["PARENT_OF_TESTS"] = "1"

@pytest.mark.skipif(condition=not asked, reason="Standalone execution", standalone=True)
def test_a():
    assert not IS_PARENT

@pytest.mark.skipif(condition=False, reason="Standalone execution", standalone=False)
def test_b():
    assert IS_PARENT
"""


class LightningTest(PytestCase):
    def test_run_if(self) -> None:
        plugins = (*PLUGIN, "-p", "torch_testing_ext.compat.lightning")
        for variables, outcome in (({}, "skipped"), ({"PL_RUN_STANDALONE_TESTS": "1"}, "passed")):
            with self.subTest(variables=variables):
                run = run_pytest({"test_x.py": SOURCE}, plugin=plugins, **variables)
                self.assertOutcomes(run, {"test_a": outcome, "test_b": "passed"})

    def test_without_the_plugin_it_is_a_skipif(self) -> None:
        run = run_pytest({"test_x.py": SOURCE}, PL_RUN_STANDALONE_TESTS="1")
        self.assertOutcomes(run, {"test_a": "failed", "test_b": "passed"})


if __name__ == "__main__":
    run_tests()
