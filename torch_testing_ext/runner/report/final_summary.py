"""The final summary of a run: all failures, then counts and lists, and a last line of fixed format. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch_testing_ext._process import shell
from torch_testing_ext.launch.folding import without_accidents

from ..model import Attempt, Category, FinishedTest, Policy, Summary, TestOutcome
from . import text
from .terminal import STYLE_OF, ConsoleLayout, Style, Styler

LAST_LINES = 20
# With more names, the command would be too long to read.
MOST_NAMES = 8
MOST_UNFINISHED = 10


def failure_details(attempt: Attempt, layout: ConsoleLayout) -> str:
    """Why a test failed: its message, the end of its output, and the processes that it left running."""
    parts = [layout.message(text.printable(attempt.message).strip("\n"))]
    if node := text.node_of(attempt.lease):
        parts.append(f"it ran on {node}")
    lines = text.printable(attempt.output[-20_000:]).rstrip().splitlines()[-LAST_LINES:]
    if lines:
        parts.append("last lines of the output of the test's process:\n" + "\n".join(lines))
    if attempt.leftovers:
        parts.append(f"left running (now terminated): {'; '.join(map(text.printable, attempt.leftovers))}")
    return "\n\n".join(part for part in parts if part)


def final_summary(
    summary: Summary,
    styler: Styler,
    slowest: int,
    command: str,
    late_warnings: Sequence[str] = (),
    layout: ConsoleLayout | None = None,
    in_full: bool = False,
) -> str:
    """`command` runs the tests whose names are appended to it. `late_warnings` came after `summary` was made.

    `in_full`: with the details of each failure, which have not been printed before.
    """
    repetitions = 1 + max((one.last.repetition for one in summary.finished), default=0)
    sections = _Sections(summary, styler, repetitions, command, layout or ConsoleLayout())
    parts = [
        sections.failures_in_full() if in_full else sections.failures(),
        sections.outcomes(),
        sections.slowest(slowest),
        sections.skipped(),
        sections.flaky(),
        sections.leaked(),
        sections.unfinished(),
        sections.warnings(late_warnings),
        sections.error(),
        sections.rerun_command(),
        [sections.last_line()],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if any(lines)) + "\n"


class _Sections:
    """The sections of the summary, each as lines; empty if there is nothing to say."""

    def __init__(self, summary: Summary, styler: Styler, repetitions: int, command: str, layout: ConsoleLayout):
        self._summary = summary
        self._styler = styler
        self._repetitions = repetitions
        self._command = command
        self._layout = layout

    def failures(self) -> list[str]:
        """One line for each."""
        lines = [self._failure_line(one) for one in self._summary.failures]
        return [self._layout.rule("="), *lines] if lines else []

    def _failure_line(self, one: FinishedTest) -> str:
        name = f"{text.outcome_in_words(one)}: {self._name(one)}"
        line = self._layout.with_title(name, text.reason(failing_attempts(one, self._summary.policy)[-1]))
        return self._styler(Style.RED, line[: len(name)]) + line[len(name) :]

    def failures_in_full(self) -> list[str]:
        return ["\n\n".join("\n".join(self._failure(one)) for one in self._summary.failures)]

    def _failure(self, one: FinishedTest) -> Iterator[str]:
        yield self._layout.rule("=")
        yield self._styler(Style.RED, f"{text.outcome_in_words(one)}: {self._name(one)}")
        details = {
            each.number: failure_details(each, self._layout) for each in failing_attempts(one, self._summary.policy)
        }
        different: dict[str, list[int]] = {}
        for number, words in details.items():
            different.setdefault(without_accidents(words), []).append(number)
        for numbers in different.values():
            yield self._layout.rule("-")
            if len(one.attempts) > 1:
                yield f"attempt{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}:"
            yield details[numbers[0]]

    def outcomes(self) -> list[str]:
        counts = Counter(one.outcome for one in self._summary.finished)
        found = [one for one in TestOutcome if counts[one]]
        took = f" in {text.duration(self._summary.seconds)}"
        if not found:
            return [self._layout.rule("="), f"no tests ran{took}"]
        plain = [f"{counts[one]} {one.value}" for one in found]
        rows = self._layout.rows([*plain[:-1], plain[-1] + took], ", ")
        styled = [self._styler(STYLE_OF[one], words) for one, words in zip(found, plain, strict=True)]
        lines = [", ".join(styled[number] for number in row) for row in rows]
        return [self._layout.rule("="), ",\n".join(lines) + took]

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
        shown = [f"  {text.printable(str(test.id))}" for test in waiting[:MOST_UNFINISHED]]
        more = [f"  and {len(waiting) - len(shown)} more"] if len(waiting) > len(shown) else []
        why = text.why_unfinished(self._summary)
        return [f"{text.count(len(waiting), 'test')} did not finish: {why}", *shown, *more]

    def error(self) -> list[str]:
        if not self._summary.error:
            return []
        return [self._styler(Style.RED, "error of run_test.py itself:"), text.printable(self._summary.error).rstrip()]

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


def failing_attempts(one: FinishedTest, policy: Policy) -> list[Attempt]:
    """The attempts that failed: a test that finally passed may still count as failed. At least one."""
    failing = [attempt for attempt in one.attempts if policy.verdict(attempt.outcome) is Category.FAILED]
    return failing or [one.last]


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
