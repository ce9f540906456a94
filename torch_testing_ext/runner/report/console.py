"""The report that scrolls by: one line a test, failures at once, everything that matters again at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..events import (
    AttemptEnded,
    Event,
    Output,
    RunBegan,
    RunEnded,
    StatusRequested,
    Stopping,
    TestFinished,
    TestIsSlow,
    Warned,
)
from ..model import Attempt, Category, FinishedTest, Policy, Summary, TestId, TestOutcome
from ..options.options import Verbosity
from . import text
from .final_summary import WIDTH, account, closing
from .snapshot import snapshot
from .terminal import STYLE_OF, LineWriter, Style, Styler


@dataclass
class Console:
    page: LineWriter
    style: Styler
    detail: Verbosity = Verbosity.NORMAL
    slowest: int = 5
    policy: Policy = field(default_factory=Policy)
    command: str = "python run_test.py"
    _all: int = 0
    _done: int = 0
    _repetitions: int = 1
    _speaker: TestId | None = None  # whose output was shown last
    _unended: dict[TestId | None, str] = field(default_factory=dict)  # lines that are not whole yet
    _warnings: list[str] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        match event:
            case RunBegan():
                self._begin(event)
            case TestIsSlow():
                where = text.place(event.lease)
                self._say(f"slow: {event.test.id} runs for {text.duration(event.seconds)} on {where}", Style.YELLOW)
            case AttemptEnded(attempt, again=True):
                self._attempt(attempt, attempt.outcome, f"{attempt.outcome.value}, is tried again", failed=True)
            case TestFinished(settled):
                self._settle(settled)
            case Output(test, words):
                self._stream(test, words)
            case StatusRequested():
                self.page.write(snapshot(event))
            case Warned(words):
                self._warnings.append(words)
                self._say(f"warning: {text.printable(words)}", Style.YELLOW)
            case Stopping(reason):
                self._say(f"no new tests begin: {text.printable(reason)}", Style.YELLOW)
            case RunEnded(summary):
                self._end(summary)
            case _:
                pass

    def _begin(self, run: RunBegan) -> None:
        self._all, self._repetitions = run.results, run.repetitions
        self._say(opening(run))

    def _settle(self, settled: FinishedTest) -> None:
        self._done += 1
        self._all = max(self._all, self._done)  # repeated until a failure: nobody knows how often
        failed = self.policy.verdict(settled.outcome) is Category.FAILED
        if failed or self.detail is not Verbosity.QUIET:
            self._attempt(settled.last, settled.outcome, text.word(settled), failed)

    def _attempt(self, attempt: Attempt, outcome: TestOutcome, word: str, failed: bool) -> None:
        self._flush(attempt.test.id)
        took = text.duration(attempt.seconds) if outcome is not TestOutcome.SKIPPED else ""
        line = f"{self._progress()}  {self.style(STYLE_OF[outcome], f'{word:<8}')}  {took:>9}  "
        self.page.write(f"{line}{text.name(attempt, self._repetitions)}{self._remark(attempt)}\n")
        if failed:
            rule = "-" * WIDTH
            self.page.write(f"{rule}\n{account(attempt)}\n{rule}\n")

    def _progress(self) -> str:
        return f"[{self._done:>{len(str(self._all))}}/{self._all}]"

    def _remark(self, attempt: Attempt) -> str:
        if attempt.outcome is TestOutcome.SKIPPED:
            return f": {text.title(attempt.message)}"
        place = text.place(attempt.lease)
        return f"  ({place})" if place and self.detail is Verbosity.VERBOSE else ""

    def _stream(self, test: TestId | None, words: str) -> None:
        """Whole lines only, under a heading where another test spoke before: several run at the same time."""
        whole, end, rest = (self._unended.pop(test, "") + words).rpartition("\n")
        if rest:
            self._unended[test] = rest
        if end:
            self._heading(test)
            self.page.write(whole + end)

    def _flush(self, test: TestId | None) -> None:
        rest = self._unended.pop(test, "")
        if rest:
            self._heading(test)
            self.page.write(rest + "\n")

    def _heading(self, test: TestId | None) -> None:
        if test != self._speaker:
            self._say(f"output of {test}:" if test else "output:", Style.FAINT)
        self._speaker = test

    def _end(self, summary: Summary) -> None:
        for test in list(self._unended):
            self._flush(test)
        self.page.write("\n" + closing(summary, self.style, self.slowest, self.command, self._warnings))

    def _say(self, line: str, style: Style | None = None) -> None:
        self.page.write((self.style(style, line) if style else line) + "\n")


def opening(run: RunBegan) -> str:
    files = len({test.id.file for test in run.tests})
    kind = "made-up device" if run.fake else "device"
    on = [text.count(len(run.devices), kind)] if run.devices else []
    on.append(text.count(run.slots, "CPU slot"))
    parts = [f"{text.count(len(run.tests), 'test')} of {text.count(files, 'file')} on {' and '.join(on)}"]
    if run.repetitions > 1:
        parts.append(f"each {run.repetitions} times")
    if run.seed is not None:
        parts.append(f"shuffled with seed {run.seed}")
    return ", ".join(parts)
