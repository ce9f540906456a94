"""The final summary of a run: all failures again, then counts and lists, and a last line of fixed format. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch_testing_ext._process import shell

from ..model import Attempt, FinishedTest, Summary, TestOutcome
from . import text
from .terminal import STYLE_OF, Style, Styler

WIDTH = 100
LAST_LINES = 20
# With more names, the command would be too long to read.
MOST_NAMES = 8


def failure_details(attempt: Attempt) -> str:
    """Why a test failed: its message, the end of its output, and the processes that it left running."""
    parts = [text.printable(attempt.message).strip("\n")]
    lines = text.printable(attempt.output[-20_000:]).rstrip().splitlines()[-LAST_LINES:]
    if lines:
        parts.append("last lines of the output of the test's process:\n" + "\n".join(lines))
    if attempt.leftovers:
        parts.append(f"left running (now terminated): {'; '.join(map(text.printable, attempt.leftovers))}")
    return "\n\n".join(part for part in parts if part)


def final_summary(
    summary: Summary, styler: Styler, slowest: int, command: str, late_warnings: Sequence[str] = ()
) -> str:
    """`command` runs the tests whose names are appended to it. `late_warnings` came after `summary` was made."""
    repetitions = 1 + max((one.last.repetition for one in summary.finished), default=0)
    sections = _Sections(summary, styler, repetitions, command)
    parts = [
        sections.failures(),
        sections.outcomes(),
        sections.slowest(slowest),
        sections.skipped(),
        sections.flaky(),
        sections.leaked(),
        sections.unfinished(),
        sections.warnings(late_warnings),
        sections.rerun_command(),
        [sections.last_line()],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if any(lines)) + "\n"


class _Sections:
    """The sections of the summary, each as lines; empty if there is nothing to say."""

    def __init__(self, summary: Summary, styler: Styler, repetitions: int, command: str):
        self._summary = summary
        self._styler = styler
        self._repetitions = repetitions
        self._command = command

    def failures(self) -> list[str]:
        return ["\n\n".join("\n".join(self._failure(one)) for one in self._summary.failures)]

    def _failure(self, one: FinishedTest) -> Iterator[str]:
        yield "=" * WIDTH
        yield self._styler(Style.RED, f"{text.outcome_in_words(one)}: {self._name(one)}")
        yield "-" * WIDTH
        yield failure_details(_last_failing(one))

    def outcomes(self) -> list[str]:
        counts = Counter(one.outcome for one in self._summary.finished)
        words = [self._styler(STYLE_OF[one], f"{counts[one]} {one.value}") for one in TestOutcome if counts[one]]
        took = f"in {text.duration(self._summary.seconds)}"
        return ["=" * WIDTH, f"{', '.join(words) or 'no tests ran'} {took}"]

    def slowest(self, most: int) -> list[str]:
        ran = [one for one in self._summary.finished if one.outcome is not TestOutcome.SKIPPED]
        chosen = sorted(ran, key=lambda one: -one.seconds)[:most]
        return _table("slowest:", ((text.duration(one.seconds), self._name(one)) for one in chosen))

    def skipped(self) -> list[str]:
        return _table("skipped:", ((str(number), reason) for reason, number in text.skip_reasons(self._summary)))

    def flaky(self) -> list[str]:
        ones = [one for one in self._summary.finished if one.outcome is TestOutcome.FLAKY]
        return _table("flaky:", ((_attempt_count(one), f"{self._name(one)}\n{_first_failure(one)}") for one in ones))

    def leaked(self) -> list[str]:
        ones = [one for one in self._summary.finished if one.outcome is TestOutcome.LEAKED]
        return _table(
            "left processes running (now terminated):", ((_leftover_count(one), self._name(one)) for one in ones)
        )

    def unfinished(self) -> list[str]:
        waiting = self._summary.unfinished
        if not waiting:
            return []
        why = "the run was interrupted" if self._summary.interrupted else "the run stopped early"
        return [f"{text.count(len(waiting), 'test')} did not finish: {why}"]

    def warnings(self, late: Sequence[str]) -> list[str]:
        unique = dict.fromkeys((*self._summary.warnings, *late))
        return [self._styler(Style.YELLOW, f"warning: {text.printable(one)}") for one in unique]

    def rerun_command(self) -> list[str]:
        names = list(dict.fromkeys(str(one.test.id) for one in self._summary.failures))
        if not names:
            return []
        chosen = " ".join(map(shell.name, names)) if len(names) <= MOST_NAMES else "--last-failed"
        return [f"to rerun {'it' if len(names) == 1 else 'them'}:", f"  {self._command} {chosen}"]

    def last_line(self) -> str:
        """Without colour, since programs read it, too."""
        return self._summary.last_line

    def _name(self, one: FinishedTest) -> str:
        return text.name(one.last, self._repetitions)


def _last_failing(one: FinishedTest) -> Attempt:
    """The last attempt that did not pass cleanly: a test that finally passed may still count as failed."""
    good = (TestOutcome.PASSED, TestOutcome.EXPECTED_FAILURE)
    failing = [attempt for attempt in one.attempts if attempt.outcome not in good]
    return failing[-1] if failing else one.last


def _table(heading: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """Right-aligns the first column and indents further lines of a cell below its first line."""
    cells = list(rows)
    if not cells:
        return []
    width = max(len(first) for first, _ in cells) + 2
    below = "\n" + " " * (width + 2)
    return [heading, *(f"{first:>{width}}  {second.replace(chr(10), below)}" for first, second in cells)]


def _leftover_count(one: FinishedTest) -> str:
    return str(len(one.last.leftovers))


def _attempt_count(one: FinishedTest) -> str:
    return text.count(len(one.attempts), "attempt")


def _first_failure(one: FinishedTest) -> str:
    return f"{one.attempts[0].outcome.value}: {text.title(one.attempts[0].message)}"
