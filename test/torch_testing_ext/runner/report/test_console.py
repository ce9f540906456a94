"""The console report, from invented events."""

import io
import itertools
import os
import pty
import re
import subprocess
import sys
import tempfile
import textwrap
import unittest
from dataclasses import replace
from pathlib import Path

from kit.files import subject
from kit.invented_runs import (
    Terminal,
    a_test,
    attempt,
    ended,
    every_outcome,
    finished_test,
    printed,
    ranks,
    run_events,
    send,
)

import torch_testing_ext
from torch_testing_ext._collectives.failure import FailureView, RankRow, combined
from torch_testing_ext._process import user_commands
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.events import (
    Output,
    RunBegan,
    Running,
    StatusRequested,
    Stopping,
    TestFinished,
    TestIsSlow,
    Warned,
)
from torch_testing_ext.runner.model import FinishedTest, Lease, Policy, TestEnd, TestId
from torch_testing_ext.runner.options import Options, StatusLevel, Verbosity
from torch_testing_ext.runner.report import github, make_reporters, wording
from torch_testing_ext.runner.report.console import Console
from torch_testing_ext.runner.report.console_layout import ConsoleLayout
from torch_testing_ext.runner.report.console_style import make_styler
from torch_testing_ext.runner.report.terminal_stream import TerminalStream
from torch_testing_ext.runner.scheduling.forecasts import Estimate

ROOT = Path(torch_testing_ext.__file__).parents[1]


def section(report, heading):
    """The lines below a heading of the summary, without their indentation."""
    lines = report.split(f"\n{heading}\n")[1].split("\n\n")[0].splitlines()
    return [line.strip() for line in lines]


class WhileItRunsTest(unittest.TestCase):
    def test_the_status_level(self):
        """Each level shows the tests of those before it, too; what was not shown in full is so at the end."""
        outcomes = (TestOutcome.PASSED, TestOutcome.FAILED, TestOutcome.LEAKED, TestOutcome.SKIPPED)
        events = list(run_events([finished_test(f"test_{one.value}", one) for one in outcomes]))
        for level, shown in (
            ("none", []),
            ("fail", ["failed"]),
            ("slow", ["failed"]),
            ("leak", ["failed", "leaked"]),
            ("pass", ["passed", "failed", "leaked"]),
            ("skip", ["passed", "failed", "leaked", "skipped"]),
            ("all", ["passed", "failed", "leaked", "skipped"]),
        ):
            with self.subTest(level=level):
                report = printed(events, level=StatusLevel(level))
                self.assertEqual(re.findall(r"(?m)^\[\d/4\]  (\w+)", report), shown)
                self.assertIn("test_failed", report)

    def test_one_line_a_test(self):
        report = printed(
            run_events([finished_test("test_a", TestOutcome.PASSED), finished_test("test_b", TestOutcome.PASSED)])
        )
        self.assertEqual(
            report.splitlines()[:3],
            [
                "2 tests from 1 file on 2 CPU slots",
                "[1/2]  passed       0.25 s  test/distributed/test_example.py::ExampleTest::test_a",
                "[2/2]  passed       0.25 s  test/distributed/test_example.py::ExampleTest::test_b",
            ],
        )

    def test_every_outcome_has_its_word(self):
        lines = [line for line in printed(run_events(every_outcome())).splitlines() if line.startswith("[")]
        for outcome in TestOutcome:
            self.assertTrue(any(f"]  {outcome.value}" in line for line in lines), outcome)

    def test_a_failure_is_printed_once_in_full(self):
        """When it happens, with one line at the end; with -q at the end, with one line when it happens."""
        finished = [finished_test("test_bad", TestOutcome.FAILED), finished_test("test_last", TestOutcome.FAILED)]
        for detail in Verbosity:
            with self.subTest(detail=detail):
                report = printed(run_events(finished), detail=detail, slowest=None)
                during, end = report.split("\n\n=", 1)
                full, short = (end, during) if detail is Verbosity.QUIET else (during, end)
                self.assertEqual(full.count("rank 1's traceback:"), 2)
                self.assertNotIn("traceback", short)
                title = "rank 1 of 2 failed: AssertionError: 1 != 2"
                name = "failed: test/distributed/test_example.py::ExampleTest::test_bad"
                if detail is Verbosity.QUIET:
                    self.assertIn(f"test/distributed/test_example.py::ExampleTest::test_bad: {title}\n", short)
                else:
                    self.assertIn(f"{name}\n    {title}\n", f"{short}\n")
                self.assertEqual(short.count(title), 2)

    def test_what_keeps_several_files_from_being_collected_is_printed_once(self):
        """Such as an error in their conftest file. The same words of two tests may have two causes."""
        why = "not run: conftest.py cannot be imported: No module named 'x'\n\nTraceback (most recent call last):"
        for ids, count in (
            ([TestId("test_a.py"), TestId("test_b.py")], 1),
            ([TestId("test_a.py", "", "test_x"), TestId("test_b.py", "", "test_x")], 2),
        ):
            ends = [finished_test("", TestOutcome.ERROR, message=why).last for _ in ids]
            files = [
                FinishedTest((replace(end, test=replace(end.test, id=of_file)),))
                for end, of_file in zip(ends, ids, strict=True)
            ]
            report = printed(run_events(files))
            self.assertEqual(report.count("Traceback"), count, report)
            self.assertEqual("test_b.py: for the same reason as test_a.py\n" in report, count == 1, report)
            self.assertEqual("2 tests failed for the same reason: " in report, count == 1, report)

    def test_attempts_that_fail_alike_are_printed_once(self):
        one = finished_test("test_bad", TestOutcome.FAILED, TestOutcome.FAILED, TestOutcome.FAILED)
        first, second, third = one.attempts
        second = replace(second, end=TestEnd(TestOutcome.FAILED, first.message.replace("0.02 s", "0.37 s")))
        third = replace(third, end=TestEnd(TestOutcome.FAILED, first.message.replace("1 != 2", "1 != 3")))
        for detail in Verbosity:
            with self.subTest(detail=detail):
                report = printed(run_events([FinishedTest((first, second, third))]), detail=detail)
                self.assertEqual(report.count("rank 1's traceback:"), 2)
                self.assertEqual(report.count("0.02 s"), 2)  # of the first and the third
                self.assertNotIn("0.37 s", report)
                alike = report.count(": in the same way as before: rank 1 of 2 failed")
                self.assertEqual(alike, detail is not Verbosity.QUIET)
                self.assertEqual("\nattempts 1, 2:\n" in report, detail is Verbosity.QUIET)

    def test_a_flaky_test_that_counts_as_failed(self):
        policy = Policy(fail_flaky=True)
        one = [finished_test("test_odd", TestOutcome.FAILED, TestOutcome.PASSED)]
        for detail in Verbosity:
            with self.subTest(detail=detail):
                report = printed(run_events(one, policy), policy=policy, detail=detail)
                self.assertEqual(report.count("rank 1's traceback:"), 1)
                self.assertIn("flaky: passed on the 2nd attempt: test/", report)

    def test_a_message_of_a_million_characters(self):
        for message, cut in (
            ("AssertionError: begin" + "x" * 1_000_000 + "end", " ... 998024 characters cut here; {} ... "),
            ("begin\n" + "some words\n" * 100_000 + "end", "\n... 1070009 characters cut here; {} ...\n"),
        ):
            one = finished_test("test_bad", TestOutcome.FAILED, message=message)
            for detail, complete in itertools.product(Verbosity, ("", "build/x.html")):
                with self.subTest(message=message[:30], detail=detail, complete=complete):
                    whole = detail is Verbosity.VERBOSE
                    layout = ConsoleLayout(complete=complete, whole=whole, show="python run_test.py show")
                    report = printed(run_events([one]), detail=detail, layout=layout)
                    if not whole:
                        self.assertLess(len(report), 3_000)
                        self.assertIn("begin", report)
                        self.assertIn(f"\ndetails:    python run_test.py show {one.test.id}\n", report)
                        continue
                    self.assertLess(len(report), 50_000)
                    self.assertEqual(len(re.findall(r"[\nx]end\n", report)), 1)
                    where = f"{complete} has all of it" if complete else "--html FILE.html keeps all of it"
                    self.assertEqual(report.count(cut.format(where)), 1)
                    self.assertEqual(report.count("characters cut here"), 1)
                    self.assertLess(max(map(len, report.splitlines())), 2_200)

    def test_a_test_that_is_retried(self):
        report = printed(
            run_events([finished_test("test_odd", TestOutcome.FAILED, TestOutcome.CRASHED, TestOutcome.PASSED)])
        )
        self.assertIn("[0/1]  failed, retrying", report)
        self.assertIn("[0/1]  crashed, retrying", report)
        self.assertIn("[1/1]  flaky: passed on the 3rd attempt", report)

    def test_quiet_and_verbose(self):
        finished = [finished_test("test_bad", TestOutcome.FAILED), finished_test("test_good", TestOutcome.PASSED)]
        quiet = printed(run_events(finished), detail=Verbosity.QUIET, slowest=None)
        self.assertNotIn("test_good", quiet)
        self.assertIn("test_bad", quiet)
        self.assertNotIn("(cpu 0, 1)", printed(run_events(finished)))
        self.assertIn("test_good  (cpu 0, 1)", printed(run_events(finished), detail=Verbosity.VERBOSE))

    def test_skips_say_why(self):
        report = printed(run_events([finished_test("test_s", TestOutcome.SKIPPED, message="no NCCL\nat all")]))
        self.assertIn("::test_s: no NCCL\n", report)

    def test_repetitions_have_numbers(self):
        twice = [FinishedTest((replace(attempt("test_a"), repetition=number),)) for number in (0, 1)]
        report = printed(run_events(twice, repetitions=2))
        self.assertIn("::test_a [1]\n", report)
        self.assertIn("[2/2]  passed       0.25 s  test/distributed/test_example.py::ExampleTest::test_a [2]\n", report)
        self.assertIn("each run 2 times", report)

    def test_messages_between_results(self):
        test = a_test("test_hang", world_size=2)
        running = Running(test, Lease(("0", "3")), 65.0, "rank 0:\n  File x.py")
        report = printed(
            [
                RunBegan((test,), (), ("0", "1"), 2, 0.0, seed=7, fake=True),
                TestIsSlow(test, 31.0, Lease(("0", "3"))),
                Warned("the cache is foreign"),
                Stopping("Ctrl-C"),
                StatusRequested((running,)),
                StatusRequested(()),
            ]
        )
        self.assertEqual(
            report.splitlines(),
            [
                "1 test from 1 file on 2 fake devices and 2 CPU slots, shuffled with seed 7",
                f"slow: {test.id} has been running for 31.0 s on gpu 0, 3",
                "warning: the cache is foreign",
                "no new tests will start: Ctrl-C",
                "1 test running:",
                f"     65.0 s  {test.id}  on gpu 0, 3",
                "      rank 0:",
                "        File x.py",
                "no test is running",
            ],
        )

    def test_streamed_output_is_shown_in_whole_lines(self):
        a, b = TestId("x.py", "T", "test_a"), TestId("x.py", "T", "test_b")
        pieces = [Output(a, "one\ntw"), Output(b, "other\n"), Output(a, "o\nthree"), ended(())]
        self.assertEqual(
            printed(pieces).split("\n\n")[0].splitlines(),
            [f"output of {a}:", "one", f"output of {b}:", "other", f"output of {a}:", "two", "three"],
        )

    def test_messages_cannot_drive_the_terminal(self):
        report = printed(
            run_events(
                [finished_test("test_bad", TestOutcome.FAILED, message="\x1b[2J\x1b]0;title\x07gone\x07\r\nnext")]
            )
        )
        self.assertNotIn("\x1b", report)
        self.assertIn("\ngone\\x07\nnext\n", report)


class SeveralFailuresTest(unittest.TestCase):
    def test_the_screen_is_that_of_the_first(self):
        one, other = (
            FailureView(f"{name} failed", show_command="show x", account=f"account of {name}") for name in ("a", "b")
        )
        failure = combined([one, other, other])
        self.assertEqual(failure.screen, "a failed\n\nand 2 more failures of this test\ndetails:    show x")
        self.assertEqual(failure.account, "account of a\n\naccount of b\n\naccount of b")
        self.assertEqual(combined([one]), one)
        texts = [FailureView.of_text(text) for text in ("plain", "text")]
        self.assertEqual(combined(texts).screen, "plain\n\ntext")
        self.assertEqual(combined([texts[0], one]).screen, "plain\n\nand 1 more failure of this test")


class FinalSummaryTest(unittest.TestCase):
    def test_the_last_line(self):
        for policy, line in (
            (Policy(), "4 passed, 6 failed, 2 skipped"),
            (Policy(fail_flaky=True), "3 passed, 7 failed, 2 skipped"),
            (Policy(fail_flaky=True, fail_leaked=True), "2 passed, 8 failed, 2 skipped"),
        ):
            self.assertEqual(printed(run_events(every_outcome(), policy), policy=policy).splitlines()[-1], line)

    def test_counts_by_outcome(self):
        report = printed(run_events(every_outcome()))
        self.assertIn(
            "\n4 passed, 6 failed, 2 skipped in 12.5 s\n"
            "  passed: 1 passed, 1 leaked, 1 flaky, 1 expected failure\n"
            "  failed: 1 assertion failure, 2 errors, 1 timeout, 1 crashed, 1 unexpected success\n",
            report,
        )

    def test_skipped_tests_by_reason(self):
        wants = [finished_test(f"test_{n}", TestOutcome.SKIPPED, message="Need", want="4 devices") for n in range(12)]
        report = printed(run_events([*wants, finished_test("test_s", TestOutcome.SKIPPED, message="no NCCL")]))
        self.assertEqual(section(report, "skipped:"), ["12  not enough devices: needs 4 devices", "1  no NCCL"])

    def test_the_slowest(self):
        finished = [finished_test(f"test_{n}", TestOutcome.PASSED, seconds=float(n)) for n in range(10)]
        slowest = section(printed(run_events(finished), slowest=2), "slowest:")
        self.assertEqual([line.split("::")[-1] for line in slowest], ["test_9", "test_8"])
        self.assertEqual(len(section(printed(run_events(finished), slowest=0), "slowest:")), 10, "all, as in pytest")
        self.assertNotIn("slowest", printed(run_events(finished), slowest=None))

    def test_flaky_and_leaked_tests_are_named(self):
        report = printed(run_events(every_outcome()))
        self.assertEqual(
            section(report, "flaky:")[0], "3 attempts  test/distributed/test_example.py::ExampleTest::test_flaky"
        )
        self.assertIn("1 != 2", section(report, "flaky:")[1])
        self.assertIn("::test_leaked", section(report, "left processes running (now terminated):")[0])

    def test_each_warning_of_tests_is_named_once_on_a_screen(self):
        def warns(name, *raised):
            test = attempt(name)
            return FinishedTest((replace(test, end=replace(test.end, raised_warnings=raised)),))

        report = printed(
            run_events([warns("test_a", "x.py:1: W: old", "x.py:2: W: odd"), warns("test_b", "x.py:1: W: old")])
        )
        name = "test/distributed/test_example.py::ExampleTest::test_a"
        shown = ["2  x.py:1: W: old", f"{name} and 1 more test", "1  x.py:2: W: odd", name]
        self.assertEqual(section(report, "warnings of tests:"), shown)
        report = printed(run_events([warns("test_a", *(f"x.py:{line}: W: old" for line in range(14)))]))
        self.assertEqual(len(section(report, "warnings of tests:")), 21)
        self.assertEqual(section(report, "warnings of tests:")[-1], "and 4 other warnings")

    def test_memory_that_is_left(self):
        report = printed(run_events([finished_test("test_m", TestOutcome.LEAKED, lease=Lease(("0", "1")))]))
        (line,) = section(report, "left memory of a device in use:")
        self.assertRegex(line, "^devices 0,1  .*::test_m$")
        self.assertNotIn("left processes running", report)

    def test_the_command_to_rerun_failures(self):
        def command(number):
            finished = [finished_test(f"test_{n} $x", TestOutcome.FAILED) for n in range(number)]
            return printed(run_events(finished)).splitlines()[-3]

        name = "test/distributed/test_example.py::ExampleTest::test_0 $x"
        self.assertEqual(command(1), f"  {user_commands.runner()} '{name}'")
        self.assertEqual(command(30), f"  {user_commands.runner()} --last-failed test/distributed/test_example.py")

    def test_a_stopped_run_counts_unfinished_tests(self):
        left = (a_test("test_b"), a_test("test_c"))
        report = printed([ended([finished_test("test_a", TestOutcome.PASSED)], interrupted=True, unfinished=left)])
        self.assertIn("2 tests did not finish: the run was interrupted\n", report)
        names = "test/distributed/test_example.py::ExampleTest::test_{}"
        command = f"{user_commands.runner()} {names.format('b')} {names.format('c')}"
        self.assertIn(f"\nto run them:\n  {command}\n", report)
        many = tuple(a_test(f"test_{n}") for n in range(30))
        report = printed([ended([finished_test("test_a", TestOutcome.FAILED)], interrupted=True, unfinished=many)])
        self.assertIn(f"\nto rerun them:\n  {user_commands.runner()} test/distributed/test_example.py\n", report)

    def test_nothing_at_all(self):
        report = printed([ended(())])
        self.assertIn("no tests ran in 12.5 s", report)
        self.assertEqual(report.splitlines()[-1], "0 passed, 0 failed, 0 skipped")

    def test_a_failure_shows_output_and_leftovers(self):
        bad = attempt(
            "test_bad", TestOutcome.CRASHED, output="x\n" * 50 + "last words\n", leftovers=("sleep 9 (pid 1)",)
        )
        report = printed(run_events([FinishedTest((bad,))]))
        self.assertIn("last words", report)
        self.assertLess(report.count("x\n"), 50)
        self.assertIn("left running (now terminated): sleep 9 (pid 1)", report)

    def test_20_million_characters_of_output(self):
        bad = attempt("test_bad", TestOutcome.FAILED, output="y" * 79 + "\n", ranks=ranks(["z" * 20_000_000]))
        bad = replace(bad, output=bad.output * 250_000)
        self.assertLess(len(printed(run_events([FinishedTest((bad,))]))), 10_000)


class StreamTest(unittest.TestCase):
    def test_characters_outside_the_encoding(self):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="ascii")
        TerminalStream(stream).write("naïve ☃\n")
        self.assertEqual(raw.getvalue(), rb"na\xefve \u2603" + b"\n")

    def run_into(self, where, code):
        """The exit code and stderr of a run whose standard output is broken."""
        script = textwrap.dedent(
            """
            import sys
            from kit.invented_runs import *
            from torch_testing_ext.runner.options import Options
            from torch_testing_ext.runner.report import make_reporters
            send(make_reporters(Options(), sys.stdout, {}), list(run_events(every_outcome())))
            sys.exit(int(sys.argv[1]))
"""
        )
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        command = [sys.executable, "-c", script, str(code)]
        environ = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, stdout=where, stderr=subprocess.PIPE, text=True, env=environ)
        return done.returncode, done.stderr

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_a_full_disk_behind_stdout_changes_no_exit_code(self):
        with open("/dev/full", "w") as full:
            code, said = self.run_into(full, 1)
        self.assertEqual(code, 1)
        self.assertEqual(said, "torchtest: console output stops here: [Errno 28] No space left on device\n")

    def test_a_closed_pipe_changes_no_exit_code(self):
        read, write = os.pipe()
        os.close(read)
        with open(write, "w") as pipe:
            self.assertEqual(self.run_into(pipe, 1), (1, ""))

    def test_colours(self):
        plain = io.StringIO()
        for environ, stream, coloured in (
            ({"TERM": "xterm"}, Terminal(), True),
            ({"TERM": "dumb"}, Terminal(), False),
            ({"TERM": "xterm", "NO_COLOR": "1"}, Terminal(), False),
            ({"TERM": "xterm"}, plain, False),
            ({"FORCE_COLOR": "1"}, plain, True),
        ):
            with self.subTest(environ=environ):
                report = io.StringIO()
                send(Console(TerminalStream(report), make_styler(stream, environ)), list(run_events(every_outcome())))
                self.assertEqual("\x1b[" in report.getvalue(), coloured)
                self.assertEqual(report.getvalue().splitlines()[-1], "4 passed, 6 failed, 2 skipped")

    def test_github_annotations(self):
        def lines(environ):
            stream = io.StringIO()
            bad = finished_test("test_bad", TestOutcome.FAILED, message="100% wrong\nreally")
            send(make_reporters(Options(), stream, environ), list(run_events([bad])))
            return [line for line in stream.getvalue().splitlines() if line.startswith("::")]

        where = "file=test/distributed/test_example.py,line=12"
        title = "title=failed%3A test/distributed/test_example.py%3A%3AExampleTest%3A%3Atest_bad"
        self.assertEqual(lines({"GITHUB_ACTIONS": "true"}), [f"::error {where},{title}::100%25 wrong%0Areally"])
        self.assertEqual(lines({}), [])
        bad = finished_test("test_bad", TestOutcome.FAILED, message="x" * 1_000_000)
        self.assertLess(len(github.annotation([bad], Policy())), 5000)

    def test_github_tells_each_cause_once_at_the_line_of_the_culprit(self):
        site = Site("/x/test_example.py", 7, "load")
        failure = FailureView("FileNotFoundError: no data", rows=(RankRow((), "", site),), account="all")
        bad = [
            finished_test(name, TestOutcome.ERROR, failure=replace(failure, within=within))
            for name, within in (("test_a", "setUpClass (m.T): "), ("test_b", "setUpClass (m.T): "), ("test_c", ""))
        ]
        with tempfile.TemporaryDirectory() as folder:
            summary, stream = Path(folder, "summary.md"), io.StringIO()
            summary.write_text("earlier step\n")
            environ = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
            other = finished_test("test_d", TestOutcome.FAILED, message="1 != 2 < 3")
            send(make_reporters(Options(), stream, environ), list(run_events([*bad, other])))
            annotations = [line for line in stream.getvalue().splitlines() if line.startswith("::")]
            self.assertEqual(len(annotations), 2, annotations)
            self.assertIn("line=7,title=3 tests failed for the same reason::", annotations[0])
            text = summary.read_text()
        self.assertTrue(text.startswith("earlier step\n### 0 passed, 4 failed, 0 skipped in "), text)
        self.assertEqual(text.count("<details>"), 2)
        self.assertEqual(text.count("no data"), 2)  # in the title and in the details
        self.assertIn("1 != 2 &lt; 3</summary>", text)
        for name in ("test_a", "test_b", "test_c"):
            self.assertIn(f"- `test/distributed/test_example.py::ExampleTest::{name}`\n", text)

    def test_a_report_that_cannot_be_written_is_a_warning_above_the_last_line(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "file").touch()
            options = Options(junitxml=Path(folder, "file", "x.xml"), perfetto=Path("/dev/full"), html=Path(folder))
            stream = io.StringIO()
            send(make_reporters(options, stream, {}), list(run_events([finished_test("test_a", TestOutcome.PASSED)])))
            self.assertEqual(os.listdir(folder), ["file"])
        lines = stream.getvalue().splitlines()
        self.assertEqual(lines[-1], "1 passed, 0 failed, 0 skipped")
        for path, why in (
            (options.junitxml, "File exists"),
            (options.perfetto, "No space left on device"),
            (options.html, "Is a directory"),
        ):
            warnings = [line for line in lines if line.startswith(f"warning: {path} could not be written")]
            self.assertEqual(len(warnings), 2, lines)  # when it happens, and above the last line
            self.assertIn(why, warnings[0])


class OnATerminalTest(unittest.TestCase):
    """The live display, on a pseudo-terminal."""

    def seen(self, **environ):
        """Everything that a run prints on a terminal, with a refresh of the live display after each event."""
        script = subject(__file__, "console_in_a_terminal.py")
        parent, child = pty.openpty()
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        environ = {**os.environ, "PYTHONPATH": path, "TERM": "xterm-256color", "COLUMNS": "100", **environ}
        process = subprocess.Popen([sys.executable, "-c", script], stdin=child, stdout=child, stderr=child, env=environ)
        os.close(child)
        pieces = []
        try:
            while data := os.read(parent, 65536):
                pieces.append(data)
        except OSError:  # EIO: the other end of the pseudo-terminal is closed
            pass
        os.close(parent)
        self.assertEqual(process.wait(), 0, b"".join(pieces))
        return b"".join(pieces).decode().replace("\r\n", "\n")

    def test_the_live_display(self):
        try:
            import rich  # noqa: F401
        except ImportError:
            self.skipTest("LIVE DISPLAY NOT CHECKED: rich is not installed")
        seen = self.seen()
        self.assertIn("\x1b[?25l", seen)  # the cursor is hidden
        self.assertGreater(seen.rindex("\x1b[?25h"), seen.rindex("\x1b[?25l"))  # and shown again at the end
        plain = wording.printable(seen)
        self.assertIn("0/2", plain)
        self.assertIn("1/2", plain)
        self.assertIn("cpu 0, 1", plain)  # where the test runs
        self.assertIn("[1/2]  passed       0.25 s  test/distributed/test_example.py::ExampleTest::test_a\n", plain)
        self.assertEqual(plain.splitlines()[-1], "1 passed, 1 failed, 0 skipped")

    def test_a_dumb_terminal_gets_lines_only(self):
        seen = self.seen(TERM="dumb")
        self.assertNotIn("\x1b", seen)
        self.assertEqual(seen.splitlines()[-1], "1 passed, 1 failed, 0 skipped")


class WordsTest(unittest.TestCase):
    def test_a_line_does_not_name_its_test_twice(self):
        one = attempt("test_a", TestOutcome.FAILED, message="killed 0.1 s into ExampleTest.test_a\n\nmore")
        self.assertEqual(wording.reason(one), "killed 0.1 s into ExampleTest.test_a")
        self.assertEqual(wording.reason(replace(one, reason="killed")), "killed")

    def test_durations(self):
        given = (0.0, 9.994, 12.34, 99.94, 125.0, 3725.0)
        expected = ["0.00 s", "9.99 s", "12.3 s", "99.9 s", "2 min 05 s", "1 h 02 min"]
        self.assertEqual([wording.duration(seconds) for seconds in given], expected)

    def test_ordinals(self):
        expected = ["1st", "2nd", "3rd", "4th", "11th", "12th", "22nd"]
        self.assertEqual([wording.ordinal(n) for n in (1, 2, 3, 4, 11, 12, 22)], expected)

    def test_printable_changes_only_illegal_characters(self):
        self.assertEqual(wording.printable("a\tb\nnaïve ☃ 𝄞"), "a\tb\nnaïve ☃ 𝄞")
        self.assertEqual(wording.printable("\x00\x0b\x7f\ufffe\ud800"), r"\x00\x0b\x7f\ufffe\ud800")
        self.assertEqual(wording.printable("10%\r20%\r\n\x1b[1;32mok\x1b[0m"), "10%\n20%\nok")


class EstimateTest(unittest.TestCase):
    def units(self, *seconds):
        return [replace(one, seconds=each) for one, each in zip(self.made(len(seconds)), seconds, strict=True)]

    def made(self, number):
        began = next(iter(run_events([finished_test(f"test_{n}", TestOutcome.PASSED) for n in range(number)])))
        return began.units

    def test_time_left_is_extrapolated_from_the_observed_speed(self):
        units = self.units(10.0, 20.0, None)
        estimate = Estimate(units)
        self.assertIsNone(estimate.left(5.0))
        estimate.done(units[0])
        self.assertEqual(estimate.left(5.0), (20.0 + 15.0) * 5.0 / 10.0)  # the unknown duration counts as the average
        self.assertIsNone(estimate.left(1.0))
        estimate.done(units[1])
        estimate.done(units[2])
        self.assertEqual(estimate.left(9.0), 0.0)

    def test_retries_do_not_make_it_negative(self):
        units = self.units(1.0)
        estimate = Estimate(units)
        estimate.done(units[0])
        estimate.done(units[0])
        self.assertEqual(estimate.left(5.0), 0.0)


class EventOrderTest(unittest.TestCase):
    def test_a_known_skip_needs_no_attempt_to_be_counted(self):
        one = finished_test("test_s", TestOutcome.SKIPPED, message="why")
        report = printed([RunBegan((one.test,), (), (), 1, 0.0), TestFinished(one), ended([one])])
        self.assertEqual(report.splitlines()[-1], "0 passed, 0 failed, 1 skipped")


if __name__ == "__main__":
    unittest.main()
