"""The scrolling console report: one line per test, failures as they happen, and a summary at the end.

Each failure is printed once in full: when it happens, or with -q at the end. In the other place it is one line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch_testing_ext._collectives.failure import Line
from torch_testing_ext._process import user_commands
from torch_testing_ext.launch.folding import without_accidents

from .. import events
from ..model import Attempt, Category, FinishedTest, Policy, Summary, TestId, TestOutcome
from ..options.options import StatusLevel, Verbosity
from . import brief, text
from .final_summary import FinalSummary
from .terminal import STYLE_OF, ConsoleLayout, LineWriter, Style, Styler

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
    slowest: int = 5
    policy: Policy = field(default_factory=Policy)
    command: str = field(default_factory=user_commands.runner)
    layout: Callable[[], ConsoleLayout] = ConsoleLayout
    level: StatusLevel = StatusLevel.ALL
    _total: int = 0
    _done: int = 0
    _repetitions: int = 1
    _last_shown: TestId | None = None  # the test whose output was shown last
    _partial_lines: dict[TestId | None, str] = field(default_factory=dict)
    _warnings: list[str] = field(default_factory=list)
    _causes: dict[Hashable, TestId] = field(default_factory=dict)  # with the first test that failed for it
    _shown: dict[tuple[TestId, int], list[str]] = field(default_factory=dict)  # failures of tests that are retried

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.RunBegan():
                self._total, self._repetitions = event.results, event.repetitions
                self._say(opening(event))
            case events.TestIsSlow() if self.level.shows(StatusLevel.SLOW):
                took, where = text.duration(event.seconds), text.place(event.lease)
                self._say(f"slow: {event.test.id} has been running for {took} on {where}", Style.YELLOW)
            case events.AttemptEnded(attempt, retry=True) if self.level.shows(StatusLevel.RETRY):
                self._attempt(attempt, attempt.outcome, f"{attempt.outcome.value}, retrying", failed=True)
            case events.TestFinished(finished):
                self._test_finished(finished)
            case events.Output(test, new):
                self._stream(test, new)
            case events.WaitingForDevices(devices, owners):
                used_by = "; ".join(map(text.printable, owners)) or "another run"
                self._say(f"waiting for {text.count(len(devices), 'device')}, used by {used_by}", Style.YELLOW)
            case events.StatusRequested():
                self.writer.write(running_tests(event))
            case events.Warned(message):
                self._warnings.append(message)
                self._say(f"warning: {text.printable(message)}", Style.YELLOW)
            case events.Stopping(reason):
                self._say(f"no new tests will start: {text.printable(reason)}", Style.YELLOW)
            case events.RunEnded(summary):
                self._run_ended(summary)

    def _test_finished(self, finished: FinishedTest) -> None:
        self._done += 1
        self._total = max(self._total, self._done)  # --until-failure: the number of repetitions is unknown
        failed = self.policy.verdict_on(finished) is Category.FAILED
        level = StatusLevel.FAIL if failed else _LEVEL_OF.get(finished.outcome, StatusLevel.PASS)
        if self.level.shows(level) and (failed or self.detail is not Verbosity.QUIET):
            last = finished.last
            failed_now = failed and self.policy.verdict(last.outcome) is Category.FAILED
            self._attempt(last, finished.outcome, text.outcome_in_words(finished), failed_now)
        self._shown.pop((finished.test.id, finished.last.repetition), None)

    def _attempt(self, attempt: Attempt, outcome: TestOutcome, word: str, failed: bool) -> None:
        self._flush(attempt.test.id)
        took = text.duration(attempt.seconds) if outcome is not TestOutcome.SKIPPED else ""
        word, more = f"{word:<8}", f"  {took:>9}  {text.name(attempt, self._repetitions)}"
        start = f"[{self._done:>{len(str(self._total))}}/{self._total}]  "
        details, title = self._failure(attempt) if failed else ([], "")
        line = self.layout().with_title(start + word + more, title) if title else more + self._remark(attempt)
        self._say(start + self.styler(STYLE_OF[outcome], word) + line.removeprefix(start + word))
        if details:
            self._say(brief.styled(details, self.layout(), self.styler) + "\n")

    def _failure(self, attempt: Attempt) -> tuple[list[Line], str]:
        """The details of an attempt that failed, or a title, if the details follow in the summary or were shown."""
        title = text.reason(attempt)
        if self.detail is Verbosity.QUIET:
            return [], title
        details = brief.details(attempt, self.layout())
        shown = self._shown.setdefault((attempt.test.id, attempt.repetition), [])
        if (pattern := without_accidents(brief.plain(details))) in shown:
            return [], f"in the same way as before: {title}"
        shown.append(pattern)
        cause = brief.cause_of(attempt)
        if cause is not None and self._causes.setdefault(cause, attempt.test.id) != attempt.test.id:
            first = self._causes[cause]
            return [], f"for the same reason as {text.one_line(first.method or str(first))}"
        return details, ""

    def _remark(self, attempt: Attempt) -> str:
        if attempt.outcome is TestOutcome.SKIPPED:
            return f": {text.title(attempt)}"
        place = ", ".join(part for part in (text.place(attempt.lease), text.memory(attempt)) if part)
        return f"  ({place})" if place and self.detail is Verbosity.VERBOSE else ""

    def _stream(self, test: TestId | None, new: str) -> None:
        """Prints whole lines only, with a heading when the test changes: several tests run at the same time."""
        whole, end, rest = (self._partial_lines.pop(test, "") + new).rpartition("\n")
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
        if test != self._last_shown:
            self._say(f"output of {test}:" if test else "output:", Style.FAINT)
        self._last_shown = test

    def _run_ended(self, summary: Summary) -> None:
        for test in list(self._partial_lines):
            self._flush(test)
        in_full = self.detail is Verbosity.QUIET or self.level is StatusLevel.NONE
        sections = FinalSummary(
            summary, self.styler, self.slowest, self.command, self._warnings, self.layout(), in_full
        )
        self.writer.write(f"\n{sections}")

    def _say(self, line: str, style: Style | None = None) -> None:
        self.writer.write((self.styler(style, line) if style else line) + "\n")


def opening(run: events.RunBegan) -> str:
    """The first line of the report."""
    files = len({test.id.file for test in run.tests})
    on = " and ".join(text.resources(run))
    nodes = f" of {text.count(len(run.nodes), 'node')}" if run.nodes else ""
    parts = [f"{text.count(len(run.tests), 'test')} from {text.count(files, 'file')} on {on}{nodes}"]
    if run.repetitions > 1:
        parts.append(f"each run {run.repetitions} times")
    if run.seed is not None:
        parts.append(f"shuffled with seed {run.seed}")
    if run.header.torch.endswith(", warm"):
        parts.append("warm")
    return ", ".join(parts)


def running_tests(status: events.StatusRequested) -> str:
    """The running tests with their times, devices or slots, and stacks."""
    if not status.running:
        return "no test is running\n"
    heading = f"{text.count(len(status.running), 'test')} running:"
    return "\n".join([heading, *(_running_test(running) for running in status.running)]) + "\n"


def _running_test(running: events.Running) -> str:
    line = f"  {text.duration(running.seconds):>9}  {running.test.id}  on {text.place(running.lease) or 'no slot'}"
    stacks = textwrap.indent(text.printable(running.stacks).rstrip(), " " * 6)
    return f"{line}\n{stacks}" if stacks else line
