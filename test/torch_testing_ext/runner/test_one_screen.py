"""Runs a project of ten test files in which much fails, and looks at what a user sees of it.

The expected texts are in `day/expected`; EXPECTTEST_ACCEPT=1 writes them.
"""

import collections
import contextlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import unittest
from pathlib import Path
from unittest import mock

import pytest
from kit.runs import ROOT, RunsCase
from kit.warm import run_warm

from torch_testing_ext._collectives.failure import height
from torch_testing_ext._process import user_commands
from torch_testing_ext._testing.bases import invocation
from torch_testing_ext.runner.cli import main

DAY = Path(__file__).parent / "day"
MOST_LINES = 15
# Ranks that end for another one's failure may do so in several ways, which time decides.
RACY = (
    *("test_crash", "test_exit", "test_one_rank_raises", "test_raises_before_finally"),
    *("test_step", "test_two_steps", "test_early_return"),
)
STYLES = re.compile(r"\x1b\[[\d;]*m")
BEGIN = re.compile(r"^\[ *\d+/\d+\]  (\w[\w ]*?) +(?:[\d.]+ s  )?(\S+::\S+|\S+\.py)", re.MULTILINE)


class OneScreenCase(RunsCase):
    def setUp(self):
        super().setUp()
        shutil.copytree(DAY, self.root, dirs_exist_ok=True)

    def run_project(self, *words, size=4):
        """Run it; return its output, and the part of each test that has failed, by name."""
        environ = {
            "SIZE": str(size),
            "COLUMNS": "80",
            "PYTHONPATH": os.pathsep.join([str(self.root), str(ROOT)]),
            "FORCE_COLOR": "1",
            "CI": "",  # where pytest shows all of a difference
        }
        run = self.start("-j1", *words, environ=environ, stdout=-1, stderr=-1)
        self.coloured = self.finish(run, 1)
        output = STYLES.sub("", self.coloured)
        progress, _, _ = output.partition("\n" + "=" * 80)
        return output, self.failures_in(progress)

    def failures_in(self, progress):
        """The part of each test that has failed, by name."""
        marks = [*BEGIN.finditer(progress), None]
        found = {}
        for mark, following in itertools.pairwise(marks):
            if mark[1] not in ("passed", "skipped"):
                found[mark[2]] = progress[mark.start() : following.start() if following else None].rstrip()
        return found

    def remade(self, columns):
        """The same failures as `report` shows them on a wider terminal, without and with colours, by name."""
        both = []
        for colour in ({"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}):
            with mock.patch.dict(os.environ, {"COLUMNS": str(columns), **colour}):
                code, said = self.run_here("report")
            self.assertEqual(code, 1)
            rule = "\n" + "=" * min(columns, 100) + "\n"
            parts = [part.strip("\n") for part in said.split(rule)[1:-1]]
            both.append({STYLES.sub("", part).splitlines()[0].partition(": ")[2]: part for part in parts})
        plain, coloured = both
        self.assertEqual(plain, {name: STYLES.sub("", part) for name, part in coloured.items()})
        return plain, coloured

    def run_here(self, *argv):
        said, before = io.StringIO(), os.getcwd()
        os.chdir(self.root)
        try:
            with contextlib.redirect_stdout(said):
                code = main(list(argv), self.root)
                return code, said.getvalue().replace(user_commands.runner(), "python run_test.py")
        finally:
            os.chdir(before)

    def check_height(self, failures, columns):
        for name, shown in failures.items():
            self.assertLessEqual(height(shown, columns), MOST_LINES, f"{name}:\n{shown}")
            self.assertLessEqual(height(shown, 80), MOST_LINES, f"{name}:\n{shown}")

    def check_expected(self, failures, file):
        steady = [shown for name, shown in sorted(failures.items()) if name.rpartition("::")[2] not in RACY]
        text = "\n\n".join(map(self._without_accidents, steady)) + "\n"
        path = DAY / "expected" / file
        if os.environ.get("EXPECTTEST_ACCEPT"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        self.maxDiff = None
        self.assertEqual(text, path.read_text())

    def check_wider(self, size):
        """At 120 columns, with and without colours."""
        plain, coloured = self.remade(120)
        self.check_height({name: shown.replace("-" * 100 + "\n", "") for name, shown in plain.items()}, 120)
        self.check_expected(plain, f"{size}-ranks-120-columns.txt")
        self.check_expected(
            {name: shown.replace("\x1b", "\N{SYMBOL FOR ESCAPE}") for name, shown in coloured.items()},
            f"{size}-ranks-120-columns-colours.txt",
        )

    def _without_accidents(self, shown):
        shown = re.sub(r"^\[ *\d+/\d+\]  ", "", shown.replace(str(self.root), "ROOT"))
        return re.sub(r"  +\d+\.\d+ s  |\d+\.\d+ s", lambda found: "  # s  " if found[0][0] == " " else "# s", shown)


@pytest.mark.slow
class OneScreenTest(OneScreenCase):
    def test_four_ranks(self):
        output, failures = self.run_project("--html", "x.html", "--perfetto", "x.json")
        self.check_height(failures, 80)
        self.check_expected(failures, "4-ranks-80-columns.txt")
        self.assertNotRegex(output, "gloo|Connection|GLHF|torch_testing_ext/")
        self.check_early_return(failures["tests/test_faults.py::FaultTest::test_early_return"], "1-3")
        self.check_summary(output)
        self.check_commands(failures)
        self.check_colours()
        self.check_wider(4)
        self.check_lanes()

    def check_lanes(self):
        """The page and the trace have a lane for each rank, with its calls."""
        page = (self.root / "x.html").read_text()
        hang = page[page.index("tests/test_faults.py::FaultTest::<b>test_hang</b>") :].partition("</details>")[0]
        for rank in range(4):
            self.assertIn(f"<div>rank {rank}</div>", hang)
        self.assertEqual(hang.count('<svg class="call waits"'), 3)
        events = json.loads((self.root / "x.json").read_text())["traceEvents"]
        of_ranks = {"launch": 40, "FaultTest.test_hang": 4, "CommTest.test_sum": 4}  # also of a test that passed
        names = collections.Counter(event["name"] for event in events if event["ph"] == "X")
        for name, number in of_ranks.items():
            self.assertGreaterEqual(names[name], number, name)
        self.assertIn("torch", [event["name"] for event in events if event.get("cat") == "import"])

    def check_colours(self):
        self.assertIn("\x1b[1mrank 1 of 4 failed: AssertionError: Tensor-likes are not close!\x1b[0m\n", self.coloured)
        self.assertIn("\x1b[1m  >    27 | self.assertEqual(total, ", self.coloured)
        self.assertIn("\x1b[32m  Expected: [5.0, 5.0, 5.0, 5.0]\x1b[0m\n", self.coloured)
        self.assertIn("\x1b[31;1m  Got:      [5.0, 5.0, 0.0, 5.0]\x1b[0m\n", self.coloured)

    def check_early_return(self, shown, others):
        self.assertIn(f"\nrank 0 left before all_reduce #3; ranks {others} are waiting in it\n", shown)
        self.assertRegex(shown, r"\n  rank 0 +passed, probably left +test_faults.py:(\d+) in test_early_return\n")
        self.assertRegex(shown, r"\n  > +\d+ \|     return\n")

    def check_summary(self, output):
        cause = r"setUpClass \(test_data.TinyTest\):\s+FileNotFoundError: no data set at /data/tiny"
        one_cause = re.search(rf"\n5 tests failed for the same reason: {cause}\n", output)
        self.assertIsNotNone(one_cause, output)
        self.assertIn(
            "\nfailed: tests/test_faults.py::FaultTest::test_mismatch\n    rank 1 calls broadcast [8]", output
        )
        counts = re.search(r"\n(\d+) passed, (\d+) failed, (\d+) skipped in ", output)
        self.assertEqual(output.rstrip().splitlines()[-1], "{} passed, {} failed, {} skipped".format(*counts.groups()))
        self.assertEqual(len(BEGIN.findall(output)), sum(map(int, counts.groups())))

    def check_commands(self, failures):
        """Each printed command is one of the runner of this project, and does what it says."""
        names = set()
        for name, shown in failures.items():
            commands = re.findall(r"^(details|run again): +(.*)$", shown, re.MULTILINE)
            self.assertTrue(commands or "for the same reason as" in shown, shown)
            title = shown.split("\n")[1:2]
            for kind, command in commands:
                words = shlex.split(command)
                self.assertEqual(words[:2], ["python", "run_test.py"], command)
                if kind == "run again":
                    names.add(words[-1])
                    continue
                code, said = self.run_here(*words[2:])
                self.assertEqual(code, 0, command)
                self.assertIn(title[0][:60], said)
                self.assertIn(name.rpartition("::")[2].partition("[")[0], said)
        environ = {"PYTHONPATH": os.pathsep.join([str(self.root), str(ROOT)])}
        listed = self.finish(self.start("--list", *sorted(names), environ=environ, stdout=-1, stderr=-1), 0)
        for name in names:
            self.assertIn(f"{name}", listed)


class OtherPlacesTest(OneScreenCase):
    def test_accounts_of_tests_with_one_name(self):
        files = [invocation.case_of("test_same", f"tests/test_{number}.py").kept_as for number in (1, 2)]
        self.assertEqual(files, ["tests/test_1.py::test_same", "tests/test_2.py::test_same"])

    @pytest.mark.slow
    def test_pytest_and_a_plain_file(self):
        """The printed commands run there, too."""
        path = os.pathsep.join([str(self.root), str(ROOT)])
        environ = {**os.environ, "SIZE": "2", "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "80"}
        for words in (
            ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_marked.py", "-k", "wrong_call"),
            ("tests/test_comm.py", "CommTest.test_one_rank_wrong"),
        ):
            with self.subTest(words=words):
                said = run_warm(*words, cwd=self.root, env=environ, together=True).stdout
                commands = dict(re.findall(r"^(details|run again): +(.*)$", said, re.MULTILINE))
                show = shlex.split(commands["details"])
                code, account = self.run_here(*show[show.index("show") :])
                self.assertEqual(code, 0)
                self.assertIn("To run it alone:\n", account)
                again = run_warm(*shlex.split(commands["run again"])[1:], cwd=self.root, env=environ, together=True)
                self.assertEqual(again.returncode, 1)
                title = re.search(r"rank 1 (of 2 failed|calls broadcast)", said)[0]
                self.assertIn(title, account)
                self.assertIn(title, again.stdout)


@pytest.mark.nightly
class ManyRanksTest(OneScreenCase):
    def test_many_ranks(self):
        for size in 8, 32:
            with self.subTest(size=size):
                _, failures = self.run_project("test_faults", "test_comm", size=size)
                self.check_height(failures, 80)
                self.check_expected(failures, f"{size}-ranks-80-columns.txt")
                for name, shown in failures.items():
                    if name.rpartition("::")[2] not in RACY:
                        self.assertNotRegex(shown, r"\d+, \d+, \d+, \d+, \d+", name)
                self.check_wider(size)


if __name__ == "__main__":
    unittest.main()
