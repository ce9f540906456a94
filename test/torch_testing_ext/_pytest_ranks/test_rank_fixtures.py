"""Fixtures that know their rank, functions of a project that make the group, and launcher variables at collection."""

from __future__ import annotations

import re

from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext.common_utils import run_tests

SUBJECT = subject(__file__, "rank_fixtures.py")
READS = subject(__file__, "fixture_reads.py")


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

    def test_launcher_variables_that_the_collection_reads(self) -> None:
        """One warning names the lines; a setting has values for the time of the collection."""
        files = {"conftest.py": "import os\nLOCAL = os.getenv('LOCAL_RANK')\n", "test_x.py": READS}
        alone = {"test_rank[0]": "passed", "test_launched": "skipped"}
        launched = {"test_rank[0]": "passed", "test_rank[1]": "passed", "test_rank[2]": "passed"}
        some = "conftest.py:2 (LOCAL_RANK), test_x.py:5 (WORLD_SIZE), test_x.py:15 (RANK)."
        # With a filter `error`, too: the warning is shown, and ends nothing.
        rows = (
            ("", alone, some),
            ("RANK WORLD_SIZE LOCAL_RANK", alone, ""),
            ("RANK=0 WORLD_SIZE=3", launched, "conftest.py:2 (LOCAL_RANK)."),
        )
        for setting, outcomes, shown in rows:
            with self.subTest(setting=setting):
                options = ("-p", "no:asyncio", "-W", "error::UserWarning", "-o", f"dist_collect_env={setting}")
                run = run_pytest(files, *options)
                self.assertOutcomes(run, {"test_launched": "passed", **outcomes})
                found = re.findall(r"LauncherVariablesWarning: .* only ranks have them: (.*?\.) Parameters", run.text)
                self.assertEqual(found, [shown] if shown else [], run.text)
        run = run_pytest(files, *options, "-n", "1", "--max-worker-restart=0")
        self.assertOutcomes(run, {"test_launched": "passed", **launched})  # xdist has no launcher
        unmarked = run_pytest({"test_x.py": "import os; os.environ.get('RANK')\ndef test_x(): ..."})
        self.assertNotIn("LauncherVariablesWarning", unmarked.text)


if __name__ == "__main__":
    run_tests()
