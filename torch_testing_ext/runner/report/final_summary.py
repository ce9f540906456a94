"""The final summary of a run: all failures, then counts and lists, and a last line of fixed format. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch_testing_ext._collectives.records import grouped
from torch_testing_ext._process import shell
from torch_testing_ext.launch.folding import without_accidents

from ..model import Category, FinishedTest, Summary, TestOutcome
from . import brief, text
from .terminal import STYLE_OF, STYLE_OF_CATEGORY, ConsoleLayout, Style, Styler

# With more names, the command would be too long to read.
MOST_NAMES = 8
MOST_UNFINISHED = 10


@dataclass
class FinalSummary:
    """The sections of the summary, each as lines; empty if there is nothing to say."""

    summary: Summary
    styler: Styler
    slowest: int
    command: str  # runs the tests whose names are appended to it
    late_warnings: Sequence[str]  # came after `summary` was made
    layout: ConsoleLayout
    in_full: bool  # with the details of each failure, which have not been printed before

    def __post_init__(self) -> None:
        self._repetitions = 1 + max((one.last.repetition for one in self.summary.finished), default=0)

    def __str__(self) -> str:
        details = "\n\n".join("\n".join(self._failure(one)) for one in self.summary.failures if self.in_full)
        parts = [
            [details] if self.in_full else self._failures(),
            self._outcomes(),
            self._slowest(),
            _table("skipped:", ((str(number), reason) for reason, number in text.skip_reasons(self.summary))),
            self._flaky(),
            self._leaked(),
            self._unfinished(),
            self._warnings(),
            self._error(),
            self._rerun_command(),
            [self.summary.last_line],  # without colour, since programs read it, too
        ]
        return "\n\n".join("\n".join(lines) for lines in parts if any(lines)) + "\n"

    def _failures(self) -> list[str]:
        """The name of each on a line, and its cause below; those with one cause together."""
        groups = brief.by_cause(self.summary.failures, self.summary.policy)
        lines = [line for group in groups for line in self._group(group)]
        return [self.layout.rule("="), *lines] if lines else []

    def _group(self, group: Sequence[FinishedTest]) -> Iterator[str]:
        cause = text.reason(brief.failing_attempts(group[0], self.summary.policy)[-1])
        if len(group) == 1:
            yield self.styler(Style.RED, f"{text.outcome_in_words(group[0])}: {self._name(group[0])}")
            yield from self.layout.wrapped(cause, "    ")
            return
        yield from self.layout.wrapped(f"{brief.heading(group)}: {cause}", "", self.styler)
        shown = group if len(group) <= MOST_NAMES else group[: MOST_NAMES - 1]
        yield from (f"    {self._name(one)}" for one in shown)
        if len(shown) < len(group):
            yield f"    and {len(group) - len(shown)} more"

    def _failure(self, one: FinishedTest) -> Iterator[str]:
        yield self.layout.rule("=")
        yield self.styler(Style.RED, f"{text.outcome_in_words(one)}: {self._name(one)}")
        details = {
            each.number: brief.details(each, self.layout) for each in brief.failing_attempts(one, self.summary.policy)
        }
        different = grouped((without_accidents(brief.plain(lines)), number) for number, lines in details.items())
        for numbers in different.values():
            yield self.layout.rule("-")
            if len(one.attempts) > 1:
                yield f"attempt{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}:"
            yield brief.styled(details[numbers[0]], self.layout, self.styler)

    def _outcomes(self) -> list[str]:
        """The numbers of the last line, with a line for each that counts several outcomes, or another one."""
        took = f" in {text.duration(self.summary.seconds)}"
        counts: dict[Category, Counter[TestOutcome]] = {category: Counter() for category in Category}
        for one in self.summary.finished:
            counts[self.summary.policy.verdict_on(one)][one.outcome] += 1
        found = [category for category in Category if counts[category]]
        if not found:
            return [self.layout.rule("="), f"no tests ran{took}"]
        totals = [(STYLE_OF_CATEGORY[one], f"{counts[one].total()} {one.value}") for one in found]
        lines = self._row(totals, took)
        for category in found:
            if set(counts[category]) != {TestOutcome(category.value)}:
                outcomes = [
                    (STYLE_OF[one], _of_them(counts[category], one)) for one in TestOutcome if counts[category][one]
                ]
                lines += self._row(outcomes, "", f"  {category.value}: ")
        return [self.layout.rule("="), *lines]

    def _row(self, cells: Sequence[tuple[Style, str]], end: str, start: str = "") -> list[str]:
        """Cells in as many rows as they need, each with its style."""
        plain = [words for _, words in cells]
        if len(plain) > 1:
            plain[0] = start + plain[0]
            plain[-1] += end
        lines = [", ".join(self.styler(*cells[number]) for number in row) for row in self.layout.rows(plain, ", ")]
        lines = [f"{line}," for line in lines[:-1]] + lines[-1:]
        lines[0] = start + lines[0]
        lines[-1] += end
        return lines

    def _slowest(self) -> list[str]:
        ran = [one for one in self.summary.finished if one.outcome is not TestOutcome.SKIPPED]
        chosen = sorted(ran, key=lambda one: -one.seconds)[: self.slowest]
        return _table("slowest:", ((text.duration(one.seconds), self._name(one)) for one in chosen))

    def _flaky(self) -> list[str]:
        ones = [one for one in self.summary.finished if one.outcome is TestOutcome.FLAKY]
        return _table(
            "flaky:",
            ((text.count(len(one.attempts), "attempt"), f"{self._name(one)}\n{_first_failure(one)}") for one in ones),
        )

    def _leaked(self) -> list[str]:
        ones = [one for one in self.summary.finished if one.outcome is TestOutcome.LEAKED]
        rows = ((str(len(one.last.leftovers)), "\n".join([self._name(one), *one.last.leftovers])) for one in ones)
        return _table("left processes running (now terminated):", rows)

    def _unfinished(self) -> list[str]:
        waiting = self.summary.unfinished
        if not waiting:
            return []
        shown = [f"  {text.printable(str(test.id))}" for test in waiting[:MOST_UNFINISHED]]
        more = [f"  and {len(waiting) - len(shown)} more"] if len(waiting) > len(shown) else []
        why = text.why_unfinished(self.summary)
        return [f"{text.count(len(waiting), 'test')} did not finish: {why}", *shown, *more]

    def _error(self) -> list[str]:
        if not self.summary.error:
            return []
        return [self.styler(Style.RED, "error of the runner itself:"), text.printable(self.summary.error).rstrip()]

    def _warnings(self) -> list[str]:
        unique = dict.fromkeys((*self.summary.warnings, *self.late_warnings))
        return [self.styler(Style.YELLOW, f"warning: {text.printable(one)}") for one in unique]

    def _rerun_command(self) -> list[str]:
        failed = [one.test.id for one in self.summary.failures]
        names = list(dict.fromkeys((*failed, *(test.id for test in self.summary.unfinished))))
        if not names:
            return []
        chosen = [shell.name(str(name)) for name in names]
        if len(names) > MOST_NAMES:  # too long to read
            files = dict.fromkeys(shell.name(name.file) for name in names)
            chosen = [*files] if self.summary.unfinished else ["--last-failed", *files]
        heading = f"to {'rerun' if failed else 'run'} {'it' if len(names) == 1 else 'them'}:"
        return [heading, f"  {' '.join([self.command, *chosen])}"]

    def _name(self, one: FinishedTest) -> str:
        return text.name(one.last, self._repetitions)


def _of_them(counts: Counter[TestOutcome], outcome: TestOutcome) -> str:
    """`2 error`; of the failures, `7 by assertions`, since all of them have failed."""
    return f"{counts[outcome]} {'by assertions' if outcome is TestOutcome.FAILED else outcome.value}"


def _table(heading: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """Right-aligns the first column and indents further lines of a cell below its first line."""
    cells = list(rows)
    if not cells:
        return []
    width = max(len(first) for first, _ in cells) + 2
    below = "\n" + " " * (width + 2)
    return [heading, *(f"{first:>{width}}  {second.replace(chr(10), below)}" for first, second in cells)]


def _first_failure(one: FinishedTest) -> str:
    return f"{one.attempts[0].outcome.value}: {text.title(one.attempts[0])}"
