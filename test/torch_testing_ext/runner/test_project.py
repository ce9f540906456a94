"""Runs the fixture project with the real run_test.py: every report agrees with the model about every test."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kit.browser import Browser, needs_chromium
from kit.junit import read_junit
from kit.runs import FinishedRun, run_test
from project_model import BY_UNITTEST, ONCE, RETRIES, copy_to, expected, last_line

import torch_testing_ext
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.report.page.timeline import css_class
from torch_testing_ext.runner.report.wording import printable

ROOT = Path(torch_testing_ext.__file__).parents[1]
PREFIX = "test/distributed/"
MODEL = expected(PREFIX)


def project(folder: Path) -> Path:
    shutil.copy(ROOT / "run_test.py", folder)
    copy_to(folder / PREFIX)
    return folder


@functools.cache
def shared_folder():
    """The folder of the runs that several tests check. Made at the first use: a process may only import this."""
    return tempfile.TemporaryDirectory(prefix="fixture_project_")


def tearDownModule():
    if shared_folder.cache_info().currsize:
        shared_folder().cleanup()


def whole_run() -> FinishedRun:
    """One run of all tests with all reports."""
    reports = {"junitxml": "x.xml", "html": "x.html", "perfetto": "trace.json", "results": "results.json"}
    options = [word for option, name in reports.items() for word in (f"--{option}", name)]
    folder = Path(shared_folder().name, "whole")
    folder.mkdir()
    return run_test(project(folder), "-v", "-j4", f"--retries={RETRIES}", *options)


class ModelTest(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.ran = whole_run()

    def test_exit_code_and_last_line(self):
        run = self.ran
        self.assertEqual(run.code, 1, run.console[-5000:] + run.complaints)
        self.assertEqual(run.console.splitlines()[-1], last_line(MODEL))
        self.assertEqual(run.complaints, "")

    def test_the_model_has_every_outcome(self):
        self.assertEqual({must.outcome for must in MODEL.values()}, set(TestOutcome))

    def test_results(self):
        found = json.loads(self.ran.report("results.json"))
        self.assertEqual(
            {one["id"]: [each["outcome"] for each in one["attempts"]] for one in found["tests"]},
            {name: [each.value for each in must.all_attempts] for name, must in MODEL.items()},
        )
        by_name = {one["id"]: one for one in found["tests"]}
        for name, must in MODEL.items():
            with self.subTest(test=name):
                one = by_name[name]
                self.assertEqual((one["outcome"], one["counts_as"]), (must.outcome.value, must.verdict.value))
                self.assertIn(must.say, one["attempts"][0]["message"])
                last = one["attempts"][-1]
                self.assertIn(must.output, last["output"])
                self.assertEqual(bool(last["leftovers"]), must.leaves, last)
                self.assertIn(must.want or "", one["want"] or "")
                self.assertEqual(one["want"] is None, must.want is None)
                for rank, said in enumerate(must.ranks):
                    self.assertIn(said, last["ranks"][rank]["output"])

    def test_a_test_that_hangs_has_its_ranks_stacks(self):
        by_name = {one["id"]: one for one in json.loads(self.ran.report("results.json"))["tests"]}
        hung = by_name[PREFIX + "test_ranks.py::RanksTest::test_hangs_in_one_rank"]["attempts"][0]
        self.assertIn("in test_hangs_in_one_rank", hung["ranks"][1]["stacks"])

    def test_console(self):
        console = self.ran.console
        lines = re.findall(r"^\[ *(\d+)/(\d+)\]  (.*?)  .*?(test/distributed/\S+?)(?::? .*)?$", console, re.MULTILINE)
        finished = {name: word for _, _, word, name in lines if "retrying" not in word}
        for name, must in MODEL.items():
            with self.subTest(test=name):
                self.assertTrue(finished[name].startswith(must.outcome.value), finished[name])
                self.assertEqual(
                    sum(each == name and "retrying" in word for *_, word, each in lines), len(must.all_attempts) - 1
                )
        self.assertEqual({count for _, count, *_ in lines}, {str(len(MODEL))})
        self.assertEqual(max(int(done) for done, *_ in lines), len(MODEL))

    def test_console_prints_failures_at_once_and_names_them_again_with_their_causes(self):
        at_once, at_the_end, _ = self.ran.console.split("\n" + "=" * 100 + "\n", 2)
        lines = at_the_end.strip().splitlines()
        failed = {name: must for name, must in MODEL.items() if must.verdict is TestOutcome.FAILED}
        for name, must in failed.items():
            with self.subTest(test=name):
                self.assertIn(name, at_once)
                self.assertIn(must.say, at_once)
                (at,) = (at for at, line in enumerate(lines) if line.endswith((f": {name}", f"    {name}")))
                if lines[at].startswith(" "):  # one of several tests that failed for the same reason
                    self.assertRegex(
                        at_the_end, rf"\n\d tests failed for the same reason: .*\n(?:    \S.*\n)*    {re.escape(name)}"
                    )
                else:
                    self.assertTrue(lines[at].startswith(must.outcome.value), lines[at])
                    self.assertTrue(lines[at + 1].startswith("    "), lines[at + 1])
        self.assertNotIn("Traceback", at_the_end)

    def test_console_says_how_many_devices_are_missing(self):
        self.assertRegex(self.ran.console, r"\nskipped:\n(  .*\n)*  1  not enough devices: needs 4096 ")

    def test_junit(self):
        root = read_junit(self.ran.report("x.xml"))
        cases = {f"{case.get('classname')}::{case.get('name')}": case for case in root.iter("testcase")}
        self.assertEqual(len(cases), len(MODEL))
        for name, must in MODEL.items():
            with self.subTest(test=name):
                file, _, inner = name.partition("::")
                module = file.removesuffix(".py").replace("/", ".")
                case = cases[f"{module}.{inner}" if "::" in inner else f"{module}::{inner or file}"]
                failed = case.find("failure") is not None or case.find("error") is not None
                skipped = case.find("skipped") is not None
                is_ = TestOutcome.FAILED if failed else TestOutcome.SKIPPED if skipped else TestOutcome.PASSED
                self.assertEqual(is_, must.verdict)
                reruns = [child for child in case if child.tag.startswith(("rerun", "flaky"))]
                flaky = sum(each.is_failure for each in must.all_attempts)
                self.assertEqual(
                    len(reruns), flaky if must.outcome is TestOutcome.FLAKY else len(must.all_attempts) - 1
                )
                words = "".join(case.itertext()) + "".join(child.get("message", "") for child in case)
                for said in (*must.ranks, must.output):
                    self.assertIn(said, words)
                if must.outcome not in (TestOutcome.EXPECTED_FAILURE, TestOutcome.LEAKED):
                    self.assertIn(must.say, words)

    def test_trace(self):
        events = json.loads(self.ran.report("trace.json"))["traceEvents"]
        seen = {event["name"] for event in events if event["ph"] == "X"}
        ran = {
            name
            for name, must in MODEL.items()
            if "::" in name and must.outcome is not TestOutcome.SKIPPED and must.attempts != ONCE
        }
        self.assertLessEqual(ran, seen)
        lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for event in events:
            if event["ph"] == "X" and event["cat"] == "unit":
                lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        for lane, spans in lanes.items():
            spans.sort()
            for (_, end), (begin, _) in itertools.pairwise(spans):
                self.assertLessEqual(end, begin, f"two units at a time on lane {lane}")

    @pytest.mark.slow
    @needs_chromium
    def test_html(self):
        with Browser() as browser:
            browser.open(self.ran.folder / "x.html")
            shown = browser.evaluate(
                """[...document.querySelectorAll('.test')].map((test) => [
                    test.querySelector('.name').textContent, test.classList[1], test.textContent,
                ])"""
            )
            self.assertEqual(
                {name: outcome for name, outcome, _ in shown}, {n: css_class(m.outcome.value) for n, m in MODEL.items()}
            )
            words = {name: text for name, _, text in shown}
            for name, must in MODEL.items():
                with self.subTest(test=name):
                    for said in (must.say, must.output, *must.ranks):
                        self.assertIn(said, words[name])
            bars = browser.evaluate("[...document.querySelectorAll('.bar')].map((bar) => bar.className.baseVal)")
            self.assertIn(f"bar {css_class(TestOutcome.TIMEOUT.value)}", bars)
            self.assertEqual(browser.complaints(), [])

    def test_20_megabytes_of_output_do_not_inflate_the_reports(self):
        for report in "x.xml", "x.html", "results.json":
            self.assertLess(len(self.ran.report(report)), 4_000_000, report)

    def test_the_last_attempt_is_numbered(self):
        self.assertIn("flaky: passed on the 3rd attempt", self.ran.console)
        self.assertEqual((self.ran.folder / "attempts").read_text().count("attempt"), 3)


def odd_run() -> FinishedRun:
    """A run of few tests, with streamed output and reports that cannot be written."""
    folder = Path(shared_folder().name, "odd")
    folder.mkdir()
    (project(folder) / "file").touch()
    reports = ("--junitxml=/dev/full", "--html=file/x.html")
    return run_test(folder, "test_simple.py", "-k", "test_fails or test_raises", "-s", "-j1", *reports)


class OddRunTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ran = odd_run()

    def test_the_outcome_is_not_affected(self):
        self.assertEqual((self.ran.code, self.ran.console.splitlines()[-1]), (1, "0 passed, 2 failed, 0 skipped"))
        self.assertEqual(self.ran.complaints, "")

    def test_a_report_that_cannot_be_written_is_a_warning(self):
        for name, why in ("/dev/full", "No space left"), (str(self.ran.folder / "file/x.html"), "File exists"):
            self.assertRegex(self.ran.console, f"warning: {re.escape(name)} could not be written .*{why}")

    def test_output_is_shown_before_the_outcome(self):
        console = self.ran.console
        self.assertLess(console.index("\nwhat it printed before\n"), console.index("]  failed"))

    def test_output_of_tests_cannot_control_the_terminal(self):
        self.assertEqual(self.ran.console, printable(self.ran.console))


class OtherRunsTest(unittest.TestCase):
    """Runs that end differently."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="fixture_project_")
        self.addCleanup(folder.cleanup)
        self.folder = project(Path(folder.name))

    def run_test(self, *arguments):
        return run_test(self.folder, *arguments)

    @pytest.mark.slow
    def test_exit_codes(self):
        table = (
            (("test_sinple.py",), 4),
            (("test_flaky.py", "-k", "of_no_test"), 5),
            (("test_ranks.py", "-k", "wants_devices"), 6),
        )
        with ThreadPoolExecutor(2) as two_at_once:
            runs = list(two_at_once.map(lambda one: self.run_test(*one[0]), table))
        for (arguments, code), run in zip(table, runs, strict=True):
            with self.subTest(arguments=arguments):
                self.assertEqual(run.code, code, run.console + run.complaints)
                if code != 4:
                    self.assertRegex(run.console.splitlines()[-1], r"^0 passed, 0 failed, \d skipped$")

    @pytest.mark.slow
    def test_the_list_agrees_with_what_runs(self):
        found = json.loads(self.run_test("--list=json").console)
        names = {one["id"] for one in found["tests"]} | {one["id"] for one in found["broken"]}
        self.assertEqual(names, set(MODEL))

    @pytest.mark.slow
    def test_what_only_the_loader_of_unittest_loads(self):
        run = self.run_test("test_same_names.py", "-o", "loader=unittest", "--results=results.json")
        tests = json.loads(run.report("results.json"))["tests"]
        must = expected(PREFIX, BY_UNITTEST)
        self.assertEqual({one["id"]: one["outcome"] for one in tests}, {n: m.outcome.value for n, m in must.items()})
        for one in tests:
            self.assertIn(must[one["id"]].say, one["attempts"][0]["message"])
        self.assertEqual((run.code, run.console.splitlines()[-1]), (1, last_line(must)))

    def test_flaky_and_leaked_can_count_as_failed(self):
        names = ["test_flaky.py", "test_crashing.py::CrashingTest::test_leaks_a_process"]
        run = self.run_test(*names, "--retries=2", "--flaky=fail", "-oleaked=fail")
        self.assertEqual((run.code, run.console.splitlines()[-1]), (1, "0 passed, 2 failed, 0 skipped"))
        self.assertIn(MODEL[PREFIX + "test_flaky.py::FlakyTest::test_passes_on_the_third_attempt"].say, run.console)


if __name__ == "__main__":
    unittest.main()
