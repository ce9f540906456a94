"""JUnit XML, trace and JSON, from invented events, and how the files are written."""

import errno
import io
import json
import os
import stat
import subprocess
import sys
import tempfile
import textwrap
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path

import junitparser
from junitparser import xunit2
from kit.invented import make_attempt
from kit.invented_runs import (
    a_test,
    attempt,
    ended,
    every_outcome,
    finished_in_world,
    finished_test,
    hang_of_ranks,
    history_of,
    ranks,
    run_events,
    send,
)
from kit.junit import Invalid, read_junit, validate

import torch_testing_ext
from torch_testing_ext._process import messages
from torch_testing_ext._process.files import write_atomically
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.events import Importing, RunBegan, UnitBegan, UnitEnded
from torch_testing_ext.runner.model import FinishedTest, Lease, Policy, RunHeader, Test, TestEnd, TestId, Unit
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.report import json_results, make_reporters, perfetto
from torch_testing_ext.runner.report.junit import render_junit
from torch_testing_ext.runner.report.recorder import Recorder

ROOT = Path(torch_testing_ext.__file__).parents[1]


def cases(finished, policy=None, **run):
    root = read_junit(render_junit(history_of(finished, policy, **run)))
    return {case.get("name"): case for case in root.iter("testcase")}


def kinds(case):
    return [child.tag for child in case]


class JUnitTest(unittest.TestCase):
    def test_counts(self):
        root = read_junit(render_junit(history_of(every_outcome())))
        expected = {"tests": "12", "failures": "6", "errors": "0"}
        self.assertEqual({name: root.get(name) for name in expected}, expected)
        self.assertEqual([suite.get("skipped") for suite in root], ["2", "0"])
        self.assertEqual(
            [suite.get("name") for suite in root],
            ["test/distributed/test_example.py", "test/distributed/test_broken.py"],
        )
        self.assertEqual(root[0].get("timestamp"), "2026-09-21T14:13:21.000+00:00")

    def test_every_outcome(self):
        for policy in Policy(), Policy(fail_flaky=True, fail_leaked=True):
            found = {
                name: [tag for tag in kinds(case) if tag != "system-out"]
                for name, case in cases(every_outcome(), policy).items()
            }
            strict = policy.fail_flaky
            self.assertEqual(
                found,
                {
                    "test_passed": [],
                    "test_failed": ["failure"],
                    "test_error": ["failure"],
                    "test_timeout": ["failure"],
                    "test_crashed": ["failure"],
                    "test_expected_failure": [],
                    "test_unexpected_success": ["failure"],
                    "test_flaky": ["failure"] * strict + ["flakyFailure", "flakyFailure"],
                    "test_leaked": ["failure"] * strict,
                    "test_skipped": ["skipped"],
                    "test_large": ["skipped"],
                    "test/distributed/test_broken.py": ["failure"],
                },
            )

    def test_names(self):
        case = cases(every_outcome())["test_failed"]
        self.assertEqual(case.get("classname"), "test.distributed.test_example.ExampleTest")
        self.assertEqual(set(case.keys()), {"classname", "name", "time"})
        root = read_junit(render_junit(history_of(every_outcome())))
        self.assertEqual(root[0].get("file"), "test/distributed/test_example.py")

    def test_a_test_that_fails_each_time(self):
        case = cases([finished_test("test_bad", TestOutcome.FAILED, TestOutcome.TIMEOUT, TestOutcome.FAILED)])[
            "test_bad"
        ]
        self.assertEqual(kinds(case), ["failure", "rerunFailure", "rerunFailure"])
        self.assertEqual([one.get("type") for one in case.findall("rerunFailure")], ["timeout", "failed"])
        self.assertIn("1 != 2", case.find("rerunFailure/stackTrace").text)

    def test_the_order_of_elements_is_surefires(self):
        many = tuple(TestOutcome(one) for one in ("crashed", "failed", "error", "passed"))
        logs = {"output": "o", "ranks": ranks(["r"])}
        for outcomes in many, many[:3], many[1:3], many[:1]:
            case = cases([finished_test("test_x", *outcomes, **logs)], Policy(fail_flaky=True))["test_x"]
            self.assertEqual(len(kinds(case)), len(outcomes) + 1)
            self.assertGreaterEqual(len(list(case.iter("system-out"))), len(outcomes))  # each attempt has its own

    def test_ranks_output_is_system_out(self):
        one = attempt("test_x", TestOutcome.FAILED, output="parent\n", ranks=ranks(["zero\n", "one\n"], "File x"))
        self.assertEqual(
            cases([FinishedTest((one,))])["test_x"].find("system-out").text,
            "the test's process:\nparent\n\nrank 0:\nzero\n\nrank 0, stacks:\nFile x\n\n"
            "rank 1:\none\n\nrank 1, stacks:\nFile x",
        )

    def test_every_character_is_legal(self):
        every = "".join(map(chr, range(0x300))) + "\ud800\udfff\ufffe\uffff\U0001f600]]>&<'\""
        one = attempt("test_" + every, TestOutcome.FAILED, message=every, output=every, ranks=ranks([every]))
        root = read_junit(render_junit(history_of([FinishedTest((one,))])))
        self.assertIn("\\x00\\x01", root.find(".//failure").text)
        self.assertIn("]]>&<'\"", root.find(".//system-out").text)

    def test_repetitions_have_names_of_their_own(self):
        twice = [
            FinishedTest((make_attempt(a_test("test_a"), TestOutcome.PASSED, repetition=number),)) for number in (0, 1)
        ]
        self.assertEqual(list(cases(twice, repetitions=2)), ["test_a [1]", "test_a [2]"])

    def test_tests_of_the_same_name_are_kept_apart(self):
        """Readers merge cases of the same name and class, so that one of them would be lost."""
        ids = [TestId("a/b.py", "T", "test_x"), TestId("a.b.py", "T", "test_x"), TestId("a/b.py", "T", "test_\x00")]
        ids.append(TestId("a/b.py", "T", "test_\\x00"))
        finished = [FinishedTest((make_attempt(Test(one), TestOutcome.PASSED),)) for one in ids]
        root = read_junit(render_junit(history_of(finished)))
        names = [case.get("name") for case in root.iter("testcase")]
        self.assertEqual(sorted(names), ["test_\\x00", "test_\\x00 #2", "test_x", "test_x #2"])

    def test_a_failure_of_a_class_is_named_by_its_class(self):
        one = make_attempt(Test(TestId("a/b.py", "T")), TestOutcome.ERROR, "tearDownClass hung")
        self.assertEqual(list(cases([FinishedTest((one,))])), ["T"])

    def test_tests_that_did_not_run(self):
        good, left = finished_test("test_good", TestOutcome.PASSED), a_test("test_left")
        for interrupted, errors in (False, []), (True, ["torchtest::the whole run"]):
            root = read_junit(render_junit(history_of([good], interrupted=interrupted, unfinished=(left,))))
            why = "did not run: the run was interrupted" if interrupted else "did not run: the run stopped early"
            self.assertEqual([skip.get("message") for skip in root.iter("skipped")], [why])
            red = [
                f"{case.get('classname')}::{case.get('name')}"
                for case in root.iter("testcase")
                if case.find("error") is not None
            ]
            self.assertEqual(red, errors)
            self.assertEqual(int(root.get("errors")), len(errors))

    def test_times_are_those_of_the_schema(self):
        for seconds in -0.004, float("nan"), float("inf"), 1e9, 1e-9, 123456.7891:
            one = FinishedTest((make_attempt(a_test("test_a"), TestOutcome.PASSED, seconds=seconds),))
            with self.subTest(seconds=seconds):
                read_junit(render_junit(history_of([one])))

    def test_a_message_of_a_million_characters_is_whole_and_its_title_short(self):
        message = "AssertionError: " + "x" * 1_000_000 + " end"
        one = attempt("test_a", TestOutcome.FAILED, message=message)
        failure = cases([FinishedTest((one,))])["test_a"].find("failure")
        self.assertEqual(failure.text, message)
        self.assertLess(len(failure.get("message")), 1000)

    def test_the_header(self):
        header = RunHeader("python run_test.py -k 'a b'", "abc", True, "node7", "2.13.0", "3.11.4", "1 cuda device: 0")
        root = read_junit(render_junit(history_of(every_outcome(), header=header)))
        for suite in root:
            self.assertEqual(suite.get("hostname"), "node7")
            found = {one.get("name"): one.get("value") for one in suite.iter("property")}
            self.assertEqual(
                found,
                {
                    "command": "python run_test.py -k 'a b'",
                    "commit": "abc (with uncommitted changes)",
                    "host": "node7",
                    "torch": "2.13.0",
                    "Python": "3.11.4",
                    "devices": "1 cuda device: 0",
                },
            )

    def test_retries_that_leak_or_skip(self):
        """A retry that is skipped, or that leaks where leaks are failures, does not make a failed test pass."""
        failed, leaked, skipped = TestOutcome.FAILED, TestOutcome.LEAKED, TestOutcome.SKIPPED
        lenient, strict = Policy(), Policy(fail_leaked=True)
        for outcomes, policy, expected in (
            ((failed, skipped), lenient, ["failure"]),
            ((leaked, skipped), strict, ["failure"]),
            ((leaked, leaked), strict, ["failure", "rerunFailure"]),
            ((failed, leaked), strict, ["failure", "flakyFailure", "flakyFailure"]),
            ((failed, leaked), lenient, ["flakyFailure"]),
            ((leaked,), lenient, []),
        ):
            with self.subTest(outcomes=outcomes, policy=policy):
                found = kinds(cases([finished_test("test_a", *outcomes)], policy)["test_a"])
                self.assertEqual([kind for kind in found if kind != "system-out"], expected)

    def test_junitparser_reads_it(self):
        finished = (*every_outcome(), finished_test("test_bad", TestOutcome.FAILED, TestOutcome.TIMEOUT))
        for policy in Policy(), Policy(fail_flaky=True, fail_leaked=True):
            history = history_of(finished, policy)
            report = render_junit(history).encode()
            failed = history.summary.count(TestOutcome.FAILED)
            for flavour in junitparser, xunit2:
                read = flavour.JUnitXml.fromstring(report)
                self.assertEqual(read.tests, len(finished))
                self.assertEqual((read.failures, read.errors), (failed, 0))
                self.assertEqual(sum(suite.skipped for suite in read), history.summary.count(TestOutcome.SKIPPED))
                bad = [case for suite in read for case in suite if any(one._tag != "skipped" for one in case.result)]
                self.assertEqual(len(bad), failed)
            again = next(case for suite in read for case in suite if case.name == "test_bad")
            self.assertIn("1 != 2", again.rerun_failures()[0].stack_trace)


class SchemaTest(unittest.TestCase):
    """The check itself: what the schema forbids is found."""

    def test_what_is_valid(self):
        for xml in (
            "<testsuites/>",
            "<testsuites time='1,234.5'/>",
            "<testsuite name='' tests='' failures='' errors=''><properties><property name='' value=''/></properties>"
            "<testcase name=''><system-out>x</system-out><failure>x</failure><error/></testcase></testsuite>",
            "<testsuites><testsuite name='' tests='' failures='' errors=''><testcase name=''><rerunError type=''>x"
            "<stackTrace>x</stackTrace><system-err/></rerunError></testcase></testsuite></testsuites>",
        ):
            validate(ET.fromstring(xml))

    def test_what_is_not(self):
        def in_case(inside="", more=""):
            suite = "<testsuite name='' tests='' failures='' errors=''>"
            return f"{suite}<testcase name='' {more}>{inside}</testcase></testsuite>"

        for xml in (
            "<testcase name=''/>",
            "<testsuites skipped='1'/>",
            "<testsuites>text</testsuites>",
            "<testsuites time='-1.0'/>",
            "<testsuites time='1e5'/>",
            "<testsuites time='nan'/>",
            "<testsuites><testcase name=''/></testsuites>",
            "<testsuites><properties/></testsuites>",
            "<testsuite name='' tests='' failures=''/>",
            "<testsuite name='' tests='' failures='' errors=''><properties><property name=''/></properties>"
            "</testsuite>",
            in_case(more="file=''"),
            in_case(more="line='1'"),
            in_case("<properties/>"),
            in_case("text"),
            in_case("<rerunFailure/>"),
            in_case("<rerunFailure type=''><system-out/><stackTrace/></rerunFailure>"),
            in_case("<rerunFailure type=''><stackTrace/><stackTrace/></rerunFailure>"),
            in_case("<failure><stackTrace/></failure>"),
            in_case("<failure line='1'/>"),
        ):
            with self.subTest(xml=xml), self.assertRaises(Invalid):
                validate(ET.fromstring(xml))


class TraceTest(unittest.TestCase):
    def setUp(self):
        test = Test(TestId("x.py", "T", "test_a"), world_size=2, devices=2)
        other = Test(TestId("x.py", "T", "test_b"))
        unit = Unit(0, (test, other))
        lease = Lease(("0", "GPU-7"), (1,))
        recorder = Recorder()
        first = make_attempt(test, TestOutcome.PASSED, seconds=1.0, began=1.1, lease=lease)
        second = make_attempt(other, TestOutcome.FAILED, "why\nmore", 0.5, began=2.2, lease=lease)
        finished = [FinishedTest((first,)), FinishedTest((second,))]
        for event in run_events(finished, devices=("0", "GPU-7"), slots=2):
            if not isinstance(event, UnitBegan | UnitEnded):
                recorder.on_event(event)
        recorder.on_event(UnitBegan(unit, lease, 1.0))
        self.events = json.loads(perfetto.render_perfetto(recorder.history(ended(finished, seconds=3.0))))[
            "traceEvents"
        ]

    def test_lanes(self):
        names = [(e["pid"], e["args"]["name"]) for e in self.events if e["name"] == "thread_name"]
        self.assertEqual(names, [(1, "gpu 0"), (1, "gpu GPU-7"), (2, "cpu 0"), (2, "cpu 1")])

    def test_a_unit_is_on_all_its_lanes_and_contains_its_tests(self):
        lanes = {}
        for event in self.events:
            if event["ph"] == "X":
                lanes.setdefault((event["pid"], event["tid"]), []).append(event)
        self.assertEqual(list(lanes), [(1, 0), (1, 1), (2, 3)])
        for unit, *tests in lanes.values():
            self.assertEqual((unit["ts"], unit["dur"]), (1_000_000, 2_000_000))  # it was still running at the end
            self.assertEqual([one["name"] for one in tests], ["x.py::T::test_a", "x.py::T::test_b"])
            for one in tests:
                self.assertLessEqual(unit["ts"], one["ts"])
                self.assertLessEqual(one["ts"] + one["dur"], unit["ts"] + unit["dur"])
            self.assertEqual(tests[1]["args"], {"outcome": "failed", "attempt": 1, "ranks": 1, "why": "why"})


class WholeWorldTest(unittest.TestCase):
    """A test in a whole world, in the files of a run."""

    def test_a_lane_for_each_class_in_the_trace(self):
        events = json.loads(perfetto.render_perfetto(history_of([finished_in_world(8)])))["traceEvents"]
        (name,) = [one for one in events if one["name"] == "process_name" and "whole world" in one["args"]["name"]]
        self.assertEqual(
            name["args"]["name"],
            "whole world of 8 ranks, 1 ms for each call, not its time: ExampleTest.test_broadcast",
        )
        own = [one for one in events if one["pid"] == name["pid"]]
        lanes = {one["tid"]: one["args"]["name"] for one in own if one["name"] == "thread_name"}
        self.assertEqual(lanes, {0: "rank 0", 1: "ranks 1-7"})
        calls = [one for one in own if one["ph"] == "X"]
        self.assertEqual([(one["tid"], one["dur"]) for one in calls], [(0, 1000), (1, 1000), (1, 1000)])
        self.assertEqual(calls[2]["ts"] - calls[1]["ts"], 1000)
        self.assertEqual(calls[0]["args"]["bytes"], 2048)

    def test_json_and_junit(self):
        facts = {"world": "whole world: 8 ranks for each test, without communication"}
        history = history_of([finished_in_world(8)], header=RunHeader(facts=facts))
        (test,) = json_results.json_document(history)["tests"]
        (world,) = test["attempts"][0]["worlds"]
        self.assertEqual((world["size"], world["block"], world["traffic"][0][1]), (8, 2, 2048))
        self.assertEqual(json_results.json_document(history)["header"]["facts"], facts)
        junit = render_junit(history)
        self.assertIn('name="world" value="whole world: 8 ranks for each test, without communication"', junit)
        self.assertIn("whole world of 8 ranks in 2 classes: 15 calls, 5 KiB sent, longest chain 2", junit)

    def test_the_journal_keeps_it(self):
        (finished,) = history_of([finished_in_world(8)]).summary.finished
        text = messages.to_json(finished.last.end)
        self.assertEqual(messages.from_json(text, messages.by_name(TestEnd)), finished.last.end)


class TraceOfRanksTest(unittest.TestCase):
    def setUp(self):
        recorder = Recorder()
        send(recorder, [Importing((), 1, 1, 1_789_999_990.0), Importing(("x.py",), 1, 1, 1_789_999_998.0)])
        *events, end = run_events([hang_of_ranks(4)])
        send(recorder, events)
        self.events = json.loads(perfetto.render_perfetto(recorder.history(end)))["traceEvents"]

    def slices(self, category):
        found = [one for one in self.events if one.get("cat") == category and one["ph"] == "X"]
        return [(one["tid"], one["name"], one["ts"] / 1e6, one["dur"] / 1e6) for one in found]

    def test_imports_come_before_the_run(self):
        self.assertEqual(self.slices("import"), [(0, "torch", 0.0, 8.0), (0, "x.py", 8.0, 2.0)])

    def test_a_lane_for_each_rank(self):
        self.assertEqual(self.slices("launch"), [(rank, "launch", 10.0, 0.5) for rank in range(4)])
        self.assertEqual(self.slices("stopped"), [(rank, "ExampleTest.test_hang", 10.5, 3.5) for rank in range(4)])
        calls = self.slices("collective")
        self.assertEqual(calls[0], (0, "all_reduce #1 [4]", 11.0, 0.03))  # until rank 3 came
        self.assertEqual(calls[1], (0, "all_reduce #2 [4]", 12.0, 2.0))  # it waits to the end
        self.assertEqual([rank for rank, name, *_ in calls if "#2" in name], [0, 1, 3])

    def test_arrows_lead_to_the_rank_that_came_last(self):
        arrows = [(one["ph"], one["id"], one["tid"]) for one in self.events if one["ph"] in "sf"]
        self.assertEqual(arrows[:2], [("s", "0.0", 0), ("f", "0.0", 3)])


class ResultsTest(unittest.TestCase):
    def test_the_document(self):
        found = json.loads(json_results.render_json(history_of(every_outcome())))
        self.assertEqual(found["verdicts"], {"passed": 4, "failed": 6, "skipped": 2})
        self.assertEqual(found["outcomes"]["error"], 2)
        by_name = {one["id"].split("::")[-1]: one for one in found["tests"]}
        self.assertEqual([one["outcome"] for one in by_name["test_flaky"]["attempts"]], ["failed", "error", "passed"])
        self.assertEqual(by_name["test_flaky"]["counts_as"], "passed")
        self.assertEqual(by_name["test_large"]["want"], "4 devices")


class WritingTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_folders_are_created_and_the_mode_follows_the_umask(self):
        path = self.folder / "a" / "b" / "x.xml"
        write_atomically(path, "naïve")
        usual = self.folder / "usual"
        usual.touch()
        self.assertEqual(path.read_text(encoding="utf-8"), "naïve")
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(usual.stat().st_mode))

    def test_an_old_report_stays_until_the_new_one_is_complete(self):
        """A limit on file sizes acts like a full disk: the old report is kept, and no temporary file is left."""
        path = self.folder / "x.xml"
        path.write_text("old")
        script = textwrap.dedent(
            """
            import resource, signal, sys
            from pathlib import Path
            from torch_testing_ext._process.files import write_atomically
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            try:
                write_atomically(Path(sys.argv[1]), "x" * 100_000)
            except OSError as error:
                print(error.errno)
"""
        )
        command = [sys.executable, "-c", script, str(path)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        self.assertEqual((done.stdout, done.stderr), (f"{errno.EFBIG}\n", ""))
        self.assertEqual(path.read_text(), "old")
        self.assertEqual(os.listdir(self.folder), ["x.xml"])

    def test_all_reports_of_one_run(self):
        options = Options(**{name: self.folder / name for name in ("junitxml", "html", "perfetto", "results")})
        before = len(os.listdir("/proc/self/fd"))
        stream = io.StringIO()
        send(make_reporters(options, stream, {}), list(run_events(every_outcome())))
        self.assertEqual(sorted(os.listdir(self.folder)), ["html", "junitxml", "perfetto", "results"])
        self.assertNotIn("warning", stream.getvalue())
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_a_pipe_is_not_replaced(self):
        path = self.folder / "pipe"
        os.mkfifo(path)
        reader = subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE, text=True)
        write_atomically(path, "words")
        self.assertEqual(reader.communicate()[0], "words")
        self.assertTrue(stat.S_ISFIFO(path.stat().st_mode))

    def test_a_run_without_a_start_event(self):
        """A run that stops before it starts still has reports."""
        recorder = Recorder()
        for render in render_junit, perfetto.render_perfetto, json_results.render_json:
            render(recorder.history(ended(())))
        self.assertEqual(recorder.history(ended(())).run, RunBegan((), (), (), 0, 0.0))


class SlicesTest(unittest.TestCase):
    def test_a_slice_is_never_negative(self):
        """A rank may begin before it was asked for, as its clock is rounded."""
        self.assertEqual(perfetto._slice("launch", "launch", 1.0, 0.999999, {})["dur"], 0)


if __name__ == "__main__":
    unittest.main()
