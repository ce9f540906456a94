"""The console report and the live display on narrow terminals, and with characters that take two columns."""

import fcntl
import io
import os
import pty
import struct
import termios
import unittest

from kit.invented_runs import Terminal, a_test, every_outcome, finished_test, printed, run_events

from torch_testing_ext._process.logs import cut, width
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.events import TestBegan, TestFinished
from torch_testing_ext.runner.model import Lease, Unit
from torch_testing_ext.runner.options import Verbosity
from torch_testing_ext.runner.report import console_style
from torch_testing_ext.runner.report.terminal_stream import TerminalStream
from torch_testing_ext.runner.scheduling.forecasts import Estimate


class NarrowTerminalTest(unittest.TestCase):
    """The report on narrow terminals, and with characters that take two columns."""

    def lines(self, columns, **options):
        odd = finished_test("test_試験" * 9, TestOutcome.FAILED, message="試験に失敗しました" * 30)
        return printed(run_events([*every_outcome(), odd]), columns=lambda: columns, **options).splitlines()

    def test_rules_and_the_counts_fit(self):
        for columns in 20, 40, 60, 100, 250:
            for detail in Verbosity:
                with self.subTest(columns=columns, detail=detail):
                    lines = self.lines(columns, detail=detail)
                    rules = {line for line in lines if line and set(line) <= set("=-")}
                    of_failures = {"-" * min(columns, 100)} if detail is Verbosity.QUIET else set()
                    self.assertEqual(rules, {"=" * min(columns, 100), *of_failures})
                    last_rule = len(lines) - 1 - lines[::-1].index("=" * min(columns, 100))
                    row = lines[last_rule + 1 : lines.index("", last_rule)]
                    self.assertLessEqual(max(map(len, row)), max(columns, len("  failed: 2 assertion failures,")))
                    counts = "4 passed, 7 failed, 2 skipped in 12.5 s   "
                    passed = "passed: 1 passed, 1 leaked, 1 flaky, 1 expected failure   "
                    failed = "failed: 2 assertion failures, 2 errors, 1 timeout, 1 crashed, 1 unexpected success"
                    self.assertEqual(" ".join(row), counts + passed + failed)

    def test_the_name_of_a_failure_is_whole_and_its_cause_below(self):
        for columns in 40, 60, 250:
            lines = self.lines(columns)
            at = next(n for n, line in enumerate(lines) if line.startswith("failed: ") and "試験" in line)
            self.assertTrue(lines[at].endswith("test_試験" * 1), "names stay whole: they can be copied")
            self.assertTrue(lines[at + 1].startswith("    試験"), lines[at + 1])
            self.assertLessEqual(width(lines[at + 1]), columns)

    def test_width(self):
        for words, columns in (
            ("abc", 3),
            ("試験", 4),
            ("e\u0301", 1),
            ("\u200bx", 1),
            ("\uff46", 2),
            ("☃", 1),
            ("😀", 2),
        ):
            self.assertEqual(width(words), columns, words)
        self.assertEqual(cut("試験試験", 8), "試験試験")
        self.assertEqual(cut("試験試験", 7), "試験...")
        self.assertEqual(cut("試験試験", 6), "試...")

    def test_the_width_of_the_terminal(self):
        parent, child = pty.openpty()
        self.addCleanup(os.close, parent)
        with open(child, "w") as stream:
            fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 47, 0, 0))
            self.assertEqual(console_style.columns(stream, {"TERM": "xterm"}), 47)
            self.assertEqual(console_style.columns(stream, {"TERM": "xterm", "COLUMNS": "33"}), 33)
            for nonsense in "0", "-1", "x", "", "²":
                self.assertEqual(console_style.columns(stream, {"TERM": "xterm", "COLUMNS": nonsense}), 47)
            fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            self.assertIsNone(console_style.columns(stream, {"TERM": "xterm"}))
        self.assertIsNone(console_style.columns(io.StringIO(), {"TERM": "xterm"}))
        self.assertIsNone(console_style.columns(Terminal(), {"TERM": "xterm"}))  # it has no descriptor

    def test_the_live_display_fits(self):
        try:
            from rich.console import Console as RichConsole
        except ImportError:
            self.skipTest("LIVE DISPLAY NOT CHECKED: rich is not installed")
        from torch_testing_ext.runner.report.live_display import Live

        tests = [a_test("test_" + "試験" * 30), a_test("test_" + "x" * 90), a_test("test_short")]
        for columns in 40, 60, 80, 200:
            screen = io.StringIO()
            live = Live(TerminalStream(Terminal()))
            live._terminal = RichConsole(file=screen, width=columns)
            units = tuple(Unit(number, (test,)) for number, test in enumerate(tests))
            live._total = 2345
            for finished in every_outcome() * 100:
                live.on_event(TestFinished(finished))
            for unit in units:
                live.on_event(TestBegan(unit.tests[0], unit, Lease(tuple(map(str, range(8)))), 0.0))
            live._estimate = Estimate(units, 2.0)
            live._began -= 5000.0
            live._terminal.print(live.draw())
            shown = screen.getvalue()
            with self.subTest(columns=columns):
                self.assertLessEqual(max(map(width, shown.splitlines())), columns)
                for words in (
                    "1200/2345",
                    "400 passed",
                    "600 failed",
                    "200 skipped",
                    "1 h 23 min",
                    "test_short",
                    "test_x",
                ):
                    self.assertIn(words, shown)


if __name__ == "__main__":
    unittest.main()
