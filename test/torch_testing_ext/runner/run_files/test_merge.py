"""Shards that are merged are the run that nobody split; differences and histories of runs."""

import contextlib
import io
import json
import re
import unittest
import xml.etree.ElementTree as ET

from kit.files import FolderCase
from kit.run_files import failed, passed, run_file, skipped

from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.cli import main

NAME = "tests/test_{}.py::T::test_{}"
TESTS = [
    passed(NAME.format(0, 0), 1.0),
    failed(NAME.format(0, 1), "AssertionError: 1 != 2\\nmore"),
    skipped(NAME.format(1, 2), "needs 4 devices", want="4 devices"),
    passed(NAME.format(1, 3), outcome=TestOutcome.FLAKY),
    passed(NAME.format(2, 4), outcome=TestOutcome.EXPECTED_FAILURE),
    passed(NAME.format(2, 5), outcome=TestOutcome.TIMEOUT, message="it took too long"),
    passed(NAME.format(3, 6), world_size=4),
    passed(NAME.format(3, 7)),
]


class RunFilesCase(FolderCase):
    def command(self, code, *words):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            self.assertEqual(main([str(word) for word in words], self.root), code, err.getvalue())
        return out.getvalue()

    def file(self, name, tests, **more):
        return run_file(self.root / f"{name}.ttx", tests, **more)


class MergeTest(RunFilesCase):
    def reports(self, name, files):
        """What the reports of a merge say, without times and machines."""
        file = {kind: self.root / f"{name}.{kind}" for kind in ("html", "xml", "json")}
        words = ("--html", file["html"], "--junitxml", file["xml"], "--results", file["json"])
        out = self.command(1, "merge", *files, "-o", self.root / f"{name}-all.ttx", *words)
        cases = {}
        for case in ET.parse(file["xml"]).iter("testcase"):
            case.attrib.pop("time")
            cases[case.get("classname"), case.get("name")] = [
                (part.tag, part.attrib, part.text) for part in case if part.tag != "system-out"
            ]
        page = re.sub(r" on (cpu|machine)[^<]*", "", file["html"].read_text())
        lines = [re.sub("<.*?>", " ", line) for line in re.findall(r'<span class="name">.*?</(?:summary|div)>', page)]
        counts = json.loads(file["json"].read_text())["outcomes"]
        return cases, sorted(lines), counts, out.splitlines()[-1]

    def test_four_shards_are_the_whole_run(self):
        whole = self.reports("whole", [self.file("one", TESTS)])
        shards = [
            self.file(f"shard-{n}", TESTS[2 * n - 2 : 2 * n], shard=f"{n}/4", host=f"machine-{n}", clock=1.8e9 + n)
            for n in (3, 1, 4, 2)
        ]
        merged = self.reports("merged", shards)
        for of_whole, of_shards in zip(whole, merged, strict=True):
            self.assertEqual(of_shards, of_whole)
        self.assertEqual((len(whole[0]), len(whole[1])), (len(TESTS), len(TESTS)))
        # A merged file can be merged, replayed and read again.
        again = self.reports("again", [self.root / "merged-all.ttx"])
        self.assertEqual(again, merged)
        page = (self.root / "merged.html").read_text()
        for number in range(1, 5):
            self.assertIn(f"machine-{number}", page)

    def test_what_is_new_since_the_last_run(self):
        before = [TESTS[0], passed(str(TESTS[1].test.id)), failed(str(TESTS[3].test.id)), TESTS[5]]
        last, now = self.file("last", before), self.file("now", TESTS, clock=1.9e9)
        self.command(1, "merge", now, "--since", last, "--html", self.root / "x.html")
        page = (self.root / "x.html").read_text()
        news = re.findall(r'<(?:details|div) class="test[^>]*data-new="([^"]*)"', page)
        self.assertEqual(sorted(news), ["mended", "new failure", *["new test"] * 4, "still failing"])


class DiffTest(RunFilesCase):
    def test_differences(self):
        last = self.file("last", [TESTS[0], passed(str(TESTS[1].test.id)), failed(str(TESTS[7].test.id)), TESTS[5]])
        now = self.file("now", [passed(str(TESTS[0].test.id), 9.0), TESTS[1], TESTS[7], TESTS[2]], clock=1.9e9)
        said = self.command(1, "diff", last, now)
        for line in (
            "new failures\n  tests/test_0.py::T::test_1: AssertionError: 1 != 2",
            "mended\n  tests/test_3.py::T::test_7",
            "slower\n  tests/test_0.py::T::test_0: 1.00 s -> 9.00 s",
            "gone\n  tests/test_2.py::T::test_5",
            "new\n  tests/test_1.py::T::test_2: skipped",
            "1 new failure, 1 mended, 1 slower, 1 gone",
        ):
            self.assertIn(line, said)
        self.assertIn("0 new failures", self.command(0, "diff", now, now))

    def test_history(self):
        name = str(TESTS[0].test.id)
        results = [passed(name), failed(name), skipped(name, "not here"), passed(name, outcome=TestOutcome.FLAKY)]
        files = [self.file(f"run-{n}", [each], clock=1.8e9 - n * 86_400) for n, each in enumerate(results)]
        lines = self.command(0, "history", "test_0", *files).splitlines()
        self.assertEqual([line.split("  ")[2] for line in lines[1:5]], ["flaky", "skipped", "failed", "passed"])
        self.assertIn("3 runs: 1 failed, 1 passed on a retry", lines[5])
        self.command(4, "history", "test_nowhere", *files)


if __name__ == "__main__":
    unittest.main()
