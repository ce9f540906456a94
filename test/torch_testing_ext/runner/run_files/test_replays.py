"""A real run as a file: `replay` prints its bytes, and its failures as data are as docs/reference/reports.md says."""

import contextlib
import io
import json
import re
import unittest

import pytest
from kit.files import subject
from kit.processes import ROOT
from kit.run_files import failed
from kit.runs import RunsCase

from torch_testing_ext.runner.cli import main
from torch_testing_ext.runner.model import Policy
from torch_testing_ext.runner.report.failure_data import failure_line

TESTS = """
import unittest

class T(unittest.TestCase):
    def test_passes(self): print("a line")
    def test_fails(self):
        print("before it failed")
        self.assertEqual([1, 2], [1, 3])
    @unittest.skip("not here")
    def test_skips(self): pass
    def test_odd(self): raise ValueError("\\x1b[31mred\\x00 \\u2603 </script>" + "x" * 20_000)
"""
FAULTS = subject(__file__, "failures_of_rank_1.py")
# The types of docs/reference/reports.md, "show --json".
SITE = {"file": (str, type(None)), "line": (int, type(None)), "function": (str, type(None))}
RANKS = {"ranks": list}
FIELDS = {
    **dict.fromkeys(("format", "test", "file", "kind", "outcome", "title"), str),
    **dict.fromkeys(("line", "world_size", "attempts", "others"), int),
    **dict.fromkeys(("culprits", "values", "printed", "remarks"), list),
    "seconds": float,
    "rows": [{**RANKS, "did": str, **SITE}],
    "sites": [SITE],
    "waits": [{**RANKS, "missing": list, "call": str, **SITE}],
    "commands": {"show": (str, type(None)), "rerun": (str, type(None))},
    "shortened": bool,
}


class ReplayTest(RunsCase):
    def command(self, *words):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.code = main([str(word) for word in words], self.root)
        return out.getvalue()

    def assertFits(self, value, kind, where="$"):
        """Each field is there, no other one, and each has its type."""
        if isinstance(kind, dict):
            self.assertEqual(value.keys(), kind.keys(), where)
            for name, of_field in kind.items():
                self.assertFits(value[name], of_field, f"{where}.{name}")
        elif isinstance(kind, list):
            for number, item in enumerate(value):
                self.assertFits(item, kind[0], f"{where}[{number}]")
        else:
            self.assertIsInstance(value, kind, where)

    def test_a_run(self):
        self.write("tests/test_a.py", TESTS)
        printed = self.finish(self.start("-j1", "--run-file=x.ttx", "--results=x.json", stdout=-1), 1)
        self.assertEqual(self.command("replay", self.root / "x.ttx"), printed)
        self.assertEqual(self.code, 1)
        one = self.command("replay", self.root / "x.ttx", "test_fails")
        self.assertIn("[1, 2]", one)
        self.assertNotIn("test_odd", one)
        shown = self.command("show", "--json", "--cache", self.root / ".torch_testing_ext")
        lines = shown.splitlines()
        self.assertEqual(len(lines), 2)
        for line in lines:
            self.assertLessEqual(len(line.encode()), 4096)
            self.assertFits(json.loads(line), FIELDS)
        by_test = {json.loads(line)["test"].rpartition("::")[2]: json.loads(line) for line in lines}
        fails = by_test["test_fails"]
        self.assertEqual((fails["format"], fails["kind"]), ("torch_testing_ext failure 1", "failed"))
        self.assertTrue(any(site["file"].endswith("test_a.py") and site["line"] == 8 for site in fails["sites"]), fails)
        in_results = FIELDS.keys() - {"format", "test", "file", "line", "kind", "outcome", "attempts", "seconds"}
        in_results -= {"world_size", "shortened"}
        for test in self.results("x.json")["tests"]:
            for attempt in test["attempts"]:
                self.assertEqual(attempt["failure"] is not None, attempt["outcome"] in ("failed", "error"))
                if attempt["failure"]:
                    self.assertFits(attempt["failure"], {name: FIELDS[name] for name in in_results})

    @pytest.mark.slow  # it starts ranks
    def test_faults_of_ranks(self):
        """A program that has only these lines knows for each fault the rank, and the file and line of it."""
        self.write("tests/test_faults.py", FAULTS)
        self.finish(self.start("-j1", "tests/test_faults.py", stdout=-1), 1)
        shown = self.command("show", "--json", "--cache", self.root / ".torch_testing_ext")
        faults = {json.loads(line)["test"].rpartition("::")[2]: json.loads(line) for line in shown.splitlines()}
        names = re.findall(r"# (test_\w+)$", FAULTS, re.MULTILINE)
        self.assertEqual(sorted(faults), sorted(names))
        for name in names:
            with self.subTest(name):
                fault = faults[name]
                self.assertFits(fault, FIELDS)
                self.assertEqual(fault["culprits"], [1], fault)
                self.assertEqual(fault["rows"][0]["ranks"], [1], fault)
                line = next(n for n, text in enumerate(FAULTS.splitlines(), 1) if text.endswith(f"# {name}"))
                sites = {(site["file"], site["line"]) for site in fault["sites"]}
                self.assertIn((str(self.root / "tests/test_faults.py"), line), sites)

    def test_what_is_cut_says_so(self):
        for message, is_cut in (("ValueError: x", False), (f"ValueError: {'x' * 20_000}\n{'y' * 30_000}", True)):
            line = failure_line(failed("tests/a.py::test_x", message), Policy())
            self.assertLessEqual(len(line), 4096)
            self.assertIs(json.loads(line)["shortened"], is_cut)

    def test_the_reference_has_each_field(self):
        page = (ROOT / "docs/reference/reports.md").read_text()
        section = page.partition("## show --json")[2].partition("\n## ")[0]
        names = [
            name for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE) for name in re.findall("`(.*?)`", row)
        ]
        self.assertEqual(set(names), set(FIELDS))


if __name__ == "__main__":
    unittest.main()
