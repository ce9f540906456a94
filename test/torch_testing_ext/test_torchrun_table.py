"""The rows of README's table "Why not `torchrun -m pytest`?": both sides run.

torchrun and its ranks are new interpreters, as users have them.
"""

import re
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from kit.files import subject
from kit.processes import ROOT, clean_environ
from kit.pytest_runs import TORCHRUN, PytestRun, run_pytest
from kit.warm import run_cold
from torch.distributed.constants import default_pg_timeout

from torch_testing_ext.common_utils import run_tests

FILES = ("quiet_faults", "rank_fails", "rank_dies", "rank_hangs")
# Each session of torchrun ends at the first rank that ends badly.
SESSIONS = {"alone": FILES[:2], "dies": FILES[2:3], "hangs": FILES[3:]}


class TorchrunTableTest(unittest.TestCase):
    theirs: dict[str, PytestRun]
    ours: PytestRun

    @pytest.mark.slow
    def test_rows(self) -> None:
        """All in one test, as they share the runs."""
        files = {"conftest.py": subject(__file__, "torchrun/shared.py")}
        files |= {f"test_{name}.py": subject(__file__, f"torchrun/{name}.py") for name in FILES}
        self.ours = run_pytest(files)
        with ThreadPoolExecutor() as pool:
            runs = {name: pool.submit(self.under_torchrun, files, names) for name, names in SESSIONS.items()}
        self.theirs = {name: run.result() for name, run in runs.items()}
        for name in self.rows():
            with self.subTest(row=name):
                getattr(self, name)()

    def under_torchrun(self, files: dict[str, str], names: tuple[str, ...]) -> PytestRun:
        temporary = tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_")
        self.addCleanup(temporary.cleanup)
        folder = Path(temporary.name)
        for name, source in files.items():
            (folder / name).write_text(source)
        plain = f"-v -p no:torch_testing_ext.pytest_plugin -p no:cacheprovider --rootdir={folder} -c /dev/null".split()
        # Each rank writes to a file of its own: lines that both print at once would be mixed.
        logs = folder / "logs"
        words = [*TORCHRUN, "--redirects=3", f"--log-dir={logs}", "-m", "pytest", *plain]
        environ = clean_environ(TMPDIR=str(folder), GROUP_TIMEOUT="2", PYTHONUNBUFFERED="1")
        done = run_cold(*words, *(f"test_{name}.py" for name in names), cwd=folder, env=environ)
        text = "".join(file.read_text() for file in sorted(logs.glob("*/attempt_0/*/std*.log")))
        return PytestRun(done.returncode, text, done.stdout + done.stderr)

    def rows(self) -> list[str]:
        """The methods that check a row."""
        return sorted(name for name in dir(self) if name.startswith("row_"))

    def test_the_table_has_these_rows(self) -> None:
        page = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Why not `torchrun -m pytest`?")[2]
        rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", page.partition("\n## ")[0], re.MULTILINE)
        tested = [name.removeprefix("row_").replace("_", " ") for name in self.rows()]
        self.assertEqual(sorted(row.lower() for row in rows[1:]), tested)

    def row_one_rank_fails(self) -> None:
        text = self.theirs["alone"].text
        # Rank 1 goes on: its next all_reduce meets that of the failed test.
        self.assertIn("assert 11.0 == 20", text)
        self.assertIn("test_rank_fails PASSED", text)
        self.assertEqual(self.ours.outcomes["test_rank_fails"], "failed")
        self.assertIn("rank 1 of 2 failed", self.ours.messages["test_rank_fails"])
        self.assertEqual(self.ours.outcomes["test_right"], "passed")

    def row_one_rank_dies(self) -> None:
        # No summary, though a test had passed.
        self.assertNotRegex(self.theirs["dies"].text, r"\d passed")
        self.assertEqual(self.ours.outcomes["test_rank_dies"], "failed")
        self.assertIn("rank 1 of 2 was killed by SIGKILL", self.ours.messages["test_rank_dies"])
        self.assertEqual([self.ours.outcomes[name] for name in ("test_before", "test_after")], ["passed", "passed"])

    def row_one_rank_never_arrives(self) -> None:
        self.assertEqual(default_pg_timeout, timedelta(minutes=30))
        theirs = self.theirs["hangs"].text
        self.assertIn("1 failed", theirs)
        self.assertNotIn("rank 1", theirs.lower())
        ours = self.ours.messages["test_hang"]
        self.assertIn("rank 1 never reached barrier #1; rank 0 is waiting in it", ours)
        self.assertRegex(ours, r"rank 1 .* test_rank_hangs\.py:13 in test_hang")

    def row_ranks_call_different_collectives(self) -> None:
        self.assertEqual(self.theirs["alone"].text.count("test_other_dtype PASSED"), 2)
        expected = r"rank 0 calls all_reduce \[4\] float32, rank 1 calls all_reduce \[4\] int32"
        self.assertRegex(self.ours.messages["test_other_dtype"], expected)

    def row_a_test_changes_global_state(self) -> None:
        self.assertEqual(self.theirs["alone"].text.count("test_of_its_own FAILED"), 2)
        self.assertEqual(self.ours.outcomes["test_of_its_own"], "passed")

    def row_reports(self) -> None:
        self.assertEqual(self.theirs["alone"].text.count("test session starts"), 2)
        self.assertEqual(len(re.findall(r"\d+ failed.* in ", self.ours.text)), 1)


if __name__ == "__main__":
    run_tests()
