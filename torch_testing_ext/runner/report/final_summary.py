"""The final summary of a run: all failures, then counts and lists, and a last line of fixed format. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_testing_ext._process import shell
from torch_testing_ext._process.words import grouped
from torch_testing_ext.launch.folding import without_accidents

from ..model import Category, FinishedTest, Summary, TestOutcome
from . import brief, text
from .terminal import STYLE_OF, STYLE_OF_CATEGORY, ConsoleLayout, Style, Styler

# With more names, the command would be too long to read.
MOST_NAMES = 8
MOST_UNFINISHED = 10
# A text with its style.
_Cell = tuple[Style, str]


@dataclass
class FinalSummary:
    """The sections of the summary, each as lines; empty if there is nothing to say."""

    summary: Summary
    styler: Styler
    slowest: int
    # Runs the tests whose names are appended to it.
    command: str
    # They came after `summary` was made.
    late_warnings: Sequence[str]
    layout: ConsoleLayout
    # With the details of each failure, which have not been printed before.
    in_full: bool

    def __post_init__(self) -> None:
        self._repetitions = 1
        for result in self.summary.finished:
            self._repetitions = max(self._repetitions, 1 + result.last.repetition)

    def __str__(self) -> str:
        """The sections that are not empty, with an empty line between them."""
        sections = [
            self._failures_in_full() if self.in_full else self._failures(),
            self._outcomes(),
            self._slowest(),
            self._skipped(),
            self._flaky(),
            self._leaked(),
            self._unfinished(),
            self._warnings(),
            self._error(),
            self._rerun_command(),
            # Without colour, since programs read it, too.
            [self.summary.last_line],
        ]
        texts = ["\n".join(lines) for lines in sections if any(lines)]
        return "\n\n".join(texts) + "\n"

    def _failures(self) -> list[str]:
        """The name of each on a line, and its cause below; those with one cause together."""
        lines: list[str] = []
        for group in brief.by_cause(self.summary.failures, self.summary.policy):
            lines += self._group(group)
        if not lines:
            return []
        return [self.layout.rule("="), *lines]

    def _failures_in_full(self) -> list[str]:
        """All failures, with an empty line between them."""
        lines: list[str] = []
        for result in self.summary.failures:
            if lines:
                lines.append("")
            lines += self._failure(result)
        return lines

    def _group(self, group: Sequence[FinishedTest]) -> Iterator[str]:
        """The lines of the failures with one cause."""
        attempt = brief.failing_attempts(group[0], self.summary.policy)[-1]
        cause = text.reason(attempt)
        if len(group) == 1:
            yield self._title(group[0])
            yield from self.layout.wrapped(cause, "    ")
            return
        yield from self.layout.wrapped(f"{brief.heading(group)}: {cause}", "", self.styler)
        shown = group
        if len(group) > MOST_NAMES:
            # The line with the number of the others is one of them.
            shown = group[: MOST_NAMES - 1]
        for result in shown:
            yield f"    {self._name(result)}"
        if len(shown) < len(group):
            yield f"    and {len(group) - len(shown)} more"

    def _title(self, result: FinishedTest) -> str:
        outcome = text.outcome_in_words(result)
        return self.styler(Style.RED, f"{outcome}: {self._name(result)}")

    def _failure(self, result: FinishedTest) -> Iterator[str]:
        """The lines of a failure with all details; those of attempts that failed in the same way once."""
        yield self.layout.rule("=")
        yield self._title(result)
        details = {}
        for attempt in brief.failing_attempts(result, self.summary.policy):
            details[attempt.number] = brief.details(attempt, self.layout)
        different = grouped((without_accidents(brief.plain(lines)), number) for number, lines in details.items())
        for numbers in different.values():
            yield self.layout.rule("-")
            if len(result.attempts) > 1:
                attempts = "attempt" if len(numbers) == 1 else "attempts"
                yield f"{attempts} {', '.join(map(str, numbers))}:"
            yield brief.styled(details[numbers[0]], self.layout, self.styler)

    def _outcomes(self) -> list[str]:
        """The numbers of the last line, with a line for each that counts several outcomes, or another one."""
        rule = self.layout.rule("=")
        took = f" in {text.duration(self.summary.seconds)}"
        if not self.summary.finished:
            return [rule, f"no tests ran{took}"]
        counts: defaultdict[Category, Counter[TestOutcome]] = defaultdict(Counter)
        for result in self.summary.finished:
            category = self.summary.policy.verdict_on(result)
            counts[category][result.outcome] += 1
        totals = []
        lines = []
        for category in Category:
            outcomes = counts[category]
            if not outcomes:
                continue
            total = f"{outcomes.total()} {category.value}"
            totals.append((STYLE_OF_CATEGORY[category], total))
            if set(outcomes) == {TestOutcome(category.value)}:
                continue
            cells = []
            for outcome in TestOutcome:
                if outcomes[outcome]:
                    cells.append((STYLE_OF[outcome], _of_them(outcomes, outcome)))
            lines += self._row(cells, start=f"  {category.value}: ")
        return [rule, *self._row(totals, end=took), *lines]

    def _row(self, cells: Sequence[_Cell], start: str = "", end: str = "") -> list[str]:
        """Cells in as many rows as they need, each with its style."""
        words = [word for _, word in cells]
        if len(words) > 1:
            words[0] = start + words[0]
            words[-1] += end
        rows = []
        for numbers in self.layout.rows(words, ", "):
            styled = [self.styler(*cells[number]) for number in numbers]
            rows.append(", ".join(styled) + ",")
        rows[-1] = rows[-1].removesuffix(",") + end
        rows[0] = start + rows[0]
        return rows

    def _slowest(self) -> list[str]:
        ran = [result for result in self.summary.finished if result.outcome is not TestOutcome.SKIPPED]
        ran.sort(key=lambda result: -result.seconds)
        rows = []
        for result in ran[: self.slowest]:
            rows.append((text.duration(result.seconds), self._name(result)))
        return _table("slowest:", rows)

    def _skipped(self) -> list[str]:
        rows = []
        for reason, number in text.skip_reasons(self.summary):
            rows.append((str(number), reason))
        return _table("skipped:", rows)

    def _with_outcome(self, outcome: TestOutcome) -> list[FinishedTest]:
        return [result for result in self.summary.finished if result.outcome is outcome]

    def _flaky(self) -> list[str]:
        rows = []
        for result in self._with_outcome(TestOutcome.FLAKY):
            attempts = text.count(len(result.attempts), "attempt")
            name = self._name(result)
            rows.append((attempts, f"{name}\n{_first_failure(result)}"))
        return _table("flaky:", rows)

    def _leaked(self) -> list[str]:
        rows = []
        for result in self._with_outcome(TestOutcome.LEAKED):
            processes = result.last.leftovers
            lines = [self._name(result), *processes]
            rows.append((str(len(processes)), "\n".join(lines)))
        return _table("left processes running (now terminated):", rows)

    def _unfinished(self) -> list[str]:
        waiting = self.summary.unfinished
        if not waiting:
            return []
        tests = text.count(len(waiting), "test")
        lines = [f"{tests} did not finish: {text.why_unfinished(self.summary)}"]
        for test in waiting[:MOST_UNFINISHED]:
            name = text.printable(str(test.id))
            lines.append(f"  {name}")
        if len(waiting) > MOST_UNFINISHED:
            lines.append(f"  and {len(waiting) - MOST_UNFINISHED} more")
        return lines

    def _error(self) -> list[str]:
        if not self.summary.error:
            return []
        heading = self.styler(Style.RED, "error of the runner itself:")
        return [heading, text.printable(self.summary.error).rstrip()]

    def _warnings(self) -> list[str]:
        unique = dict.fromkeys((*self.summary.warnings, *self.late_warnings))
        lines = []
        for warning in unique:
            words = f"warning: {text.printable(warning)}"
            lines.append(self.styler(Style.YELLOW, words))
        return lines

    def _rerun_command(self) -> list[str]:
        """The command that runs the tests again that failed or did not finish."""
        failed = [result.test.id for result in self.summary.failures]
        unfinished = [test.id for test in self.summary.unfinished]
        names = list(dict.fromkeys((*failed, *unfinished)))
        if not names:
            return []
        if len(names) <= MOST_NAMES:
            words = [shell.name(str(name)) for name in names]
        else:
            # All names would be too long to read.
            files = [shell.name(name.file) for name in names]
            words = list(dict.fromkeys(files))
            if not unfinished:
                words.insert(0, "--last-failed")
        verb = "rerun" if failed else "run"
        tests = "it" if len(names) == 1 else "them"
        command = " ".join([self.command, *words])
        return [f"to {verb} {tests}:", f"  {command}"]

    def _name(self, result: FinishedTest) -> str:
        return text.name(result.last, self._repetitions)


def _of_them(counts: Counter[TestOutcome], outcome: TestOutcome) -> str:
    """`2 error`; of the failures, `7 by assertions`, since all of them have failed."""
    words = "by assertions" if outcome is TestOutcome.FAILED else outcome.value
    return f"{counts[outcome]} {words}"


def _table(heading: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    """Right-aligns the first column and indents further lines of a cell below its first line."""
    if not rows:
        return []
    width = max(len(first) for first, _ in rows) + 2
    below = "\n" + " " * (width + 2)
    lines = [heading]
    for first, second in rows:
        indented = second.replace("\n", below)
        lines.append(f"{first:>{width}}  {indented}")
    return lines


def _first_failure(result: FinishedTest) -> str:
    attempt = result.attempts[0]
    return f"{attempt.outcome.value}: {text.title(attempt)}"
