"""The console report that scrolls: a line for each test, failures as they happen, and a summary.

Each failure is printed once in full: when it happens, or with -q at the end. In the other place it is one line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch_testing_ext._collectives.failure import Line
from torch_testing_ext._process import user_commands
from torch_testing_ext._process.same_texts import without_accidents
from torch_testing_ext._process.words import count
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner import events
from torch_testing_ext.runner.model import Attempt, FinishedTest, Policy, Summary, TestId
from torch_testing_ext.runner.options import StatusLevel, Verbosity

from . import wording
from .brief_failures import brief_details, cause_of, plain, styled
from .console_layout import ConsoleLayout
from .console_style import STYLE_OF, Style, Styler
from .final_summary import FinalSummary
from .terminal_stream import LineWriter

_LEVEL_OF = {
    TestOutcome.FLAKY: StatusLevel.RETRY,
    TestOutcome.LEAKED: StatusLevel.LEAK,
    TestOutcome.SKIPPED: StatusLevel.SKIP,
}


@dataclass
class Console:
    """Reports a run on the console."""

    writer: LineWriter
    styler: Styler
    detail: Verbosity = Verbosity.NORMAL
    slowest: int | None = 5
    policy: Policy = field(default_factory=Policy)
    command: str = field(default_factory=user_commands.runner)
    # Without its columns: the user may resize the terminal during the run.
    layout: ConsoleLayout = field(default_factory=ConsoleLayout)
    # The columns of the terminal now.
    columns: Callable[[], int | None] = lambda: None
    level: StatusLevel = StatusLevel.ALL
    # The page with the whole run, if one is written.
    page: Path | None = None
    _total: int = 0
    _done: int = 0
    _repetitions: int = 1
    # The test whose output was shown last.
    _last_shown: TestId | None = None
    _partial_lines: dict[TestId | None, str] = field(default_factory=dict)
    _warnings: list[str] = field(default_factory=list)
    # The causes of failures, with the first test that failed for each.
    _causes: dict[Hashable, TestId] = field(default_factory=dict)
    # Failures of tests that are retried.
    _shown: dict[tuple[TestId, int], list[str]] = field(default_factory=dict)

    def on_event(self, event: events.Event) -> None:
        """Print what the user has to know of an event."""
        match event:
            case events.RunBegan():
                self._total = event.results
                self._repetitions = event.repetitions
                self._say(opening(event))
            case events.TestIsSlow() if self.level.shows(StatusLevel.SLOW):
                took = wording.duration(event.seconds)
                where = wording.place(event.lease)
                self._say(f"slow: {event.test.id} has been running for {took} on {where}", Style.YELLOW)
            case events.AttemptEnded(attempt, retry=True) if self.level.shows(StatusLevel.RETRY):
                self._attempt(attempt, attempt.outcome, f"{attempt.outcome.value}, retrying", failed=True)
            case events.TestFinished(finished):
                self._test_finished(finished)
            case events.Output(test, new):
                self._stream(test, new)
            case events.WaitingForDevices(devices, owners):
                used_by = "; ".join(wording.printable(owner) for owner in owners)
                if not used_by:
                    used_by = "another run"
                self._say(f"waiting for {count(len(devices), 'device')}, used by {used_by}", Style.YELLOW)
            case events.StatusRequested():
                self.writer.write(running_tests(event))
            case events.Warned(message):
                self._warnings.append(message)
                self._say(f"warning: {wording.printable(message)}", Style.YELLOW)
            case events.Stopping(reason):
                self._say(f"no new tests will start: {wording.printable(reason)}", Style.YELLOW)
            case events.RunEnded(summary):
                self._run_ended(summary)

    def _test_finished(self, finished: FinishedTest) -> None:
        self._done += 1
        # With --repeat=until-failure, the number of repetitions is unknown.
        self._total = max(self._total, self._done)
        failed = self.policy.verdict_on(finished) is TestOutcome.FAILED
        level = StatusLevel.FAIL if failed else _LEVEL_OF.get(finished.outcome, StatusLevel.PASS)
        is_quiet = self.detail is Verbosity.QUIET and not failed
        if self.level.shows(level) and not is_quiet:
            last = finished.last
            last_failed = self.policy.verdict(last.outcome) is TestOutcome.FAILED
            words = wording.outcome_in_words(finished)
            self._attempt(last, finished.outcome, words, failed and last_failed)
        self._shown.pop((finished.test.id, finished.last.repetition), None)

    def _attempt(self, attempt: Attempt, outcome: TestOutcome, word: str, failed: bool) -> None:
        """Print the line of an attempt, and the details of a failure below it."""
        self._flush(attempt.test.id)
        took = "" if outcome is TestOutcome.SKIPPED else wording.duration(attempt.seconds)
        digits = len(str(self._total))
        number = f"[{self._done:>{digits}}/{self._total}]  "
        word = f"{word:<8}"
        rest = f"  {took:>9}  {wording.name(attempt, self._repetitions)}"
        details, title = self._failure(attempt) if failed else ([], "")
        if title:
            before = number + word
            rest = self._layout_now().with_title(before + rest, title).removeprefix(before)
        else:
            rest += self._remark(attempt)
        self._say(number + self.styler(STYLE_OF[outcome], word) + rest)
        if details:
            self._say(styled(details, self._layout_now(), self.styler) + "\n")

    def _failure(self, attempt: Attempt) -> tuple[list[Line], str]:
        """The details of an attempt that failed, or a title, if the details follow in the summary or were shown."""
        title = wording.reason(attempt)
        if self.detail is Verbosity.QUIET:
            return [], title
        details = brief_details(attempt, self._layout_now())
        pattern = without_accidents(plain(details))
        shown = self._shown.setdefault((attempt.test.id, attempt.repetition), [])
        if pattern in shown:
            return [], f"in the same way as before: {title}"
        shown.append(pattern)
        cause = cause_of(attempt)
        if cause is None:
            return details, ""
        first = self._causes.setdefault(cause, attempt.test.id)
        if first == attempt.test.id:
            return details, ""
        name = first.method or str(first)
        if first.cls != attempt.test.id.cls and first.file == attempt.test.id.file:
            name = f"{name} of {first.cls}"
        return [], f"for the same reason as {wording.one_line(name)}"

    def _remark(self, attempt: Attempt) -> str:
        if attempt.outcome is TestOutcome.SKIPPED:
            return f": {wording.title(attempt)}"
        if self.detail is not Verbosity.VERBOSE:
            return ""
        facts = (wording.place(attempt.lease), wording.memory(attempt))
        known = ", ".join(fact for fact in facts if fact)
        return f"  ({known})" if known else ""

    def _stream(self, test: TestId | None, new: str) -> None:
        """Prints whole lines only, with a heading when the test changes: several tests run at the same time."""
        written = self._partial_lines.pop(test, "") + new
        whole, end, rest = written.rpartition("\n")
        if rest:
            self._partial_lines[test] = rest
        if end:
            self._heading(test)
            self.writer.write(whole + end)

    def _flush(self, test: TestId | None) -> None:
        rest = self._partial_lines.pop(test, "")
        if rest:
            self._heading(test)
            self.writer.write(rest + "\n")

    def _heading(self, test: TestId | None) -> None:
        if test == self._last_shown:
            return
        self._last_shown = test
        self._say(f"output of {test}:" if test else "output:", Style.FAINT)

    def _run_ended(self, summary: Summary) -> None:
        for test in list(self._partial_lines):
            self._flush(test)
        sections = FinalSummary(
            summary,
            self.styler,
            self.slowest,
            self.command,
            self._warnings,
            self._layout_now(),
            in_full=self.detail is Verbosity.QUIET or self.level is StatusLevel.NONE,
            page=self.page,
        )
        self.writer.write(f"\n{sections}")

    def _layout_now(self) -> ConsoleLayout:
        return replace(self.layout, columns=self.columns())

    def _say(self, line: str, style: Style | None = None) -> None:
        if style is not None:
            line = self.styler(style, line)
        self.writer.write(f"{line}\n")


def opening(run: events.RunBegan) -> str:
    """The first line of the report."""
    file_names = {test.id.file for test in run.tests}
    tests = count(len(run.tests), "test")
    files = count(len(file_names), "file")
    resources = " and ".join(wording.resources(run))
    first = f"{tests} from {files} on {resources}"
    if run.nodes:
        nodes = count(len(run.nodes), "node")
        first += f" of {nodes}"
    parts = [first]
    if run.repetitions > 1:
        parts.append(f"each run {run.repetitions} times")
    if run.seed is not None:
        parts.append(f"shuffled with seed {run.seed}")
    if run.header.torch.endswith(", warm"):
        parts.append("warm")
    line = ", ".join(parts)
    return f"{line}\n{run.note}" if run.note else line


def running_tests(status: events.StatusRequested) -> str:
    """The running tests with their times, devices or slots, and stacks."""
    if not status.running:
        return "no test is running\n"
    lines = [f"{count(len(status.running), 'test')} running:"]
    for running in status.running:
        took = wording.duration(running.seconds)
        where = wording.place(running.lease) or "no slot"
        lines.append(f"  {took:>9}  {running.test.id}  on {where}")
        stacks = wording.printable(running.stacks).rstrip()
        if stacks:
            lines.append(textwrap.indent(stacks, " " * 6))
    return "\n".join(lines) + "\n"
