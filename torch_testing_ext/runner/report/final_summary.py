"""The final summary of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process import shell_words
from torch_testing_ext._process.same_texts import without_accidents
from torch_testing_ext._process.words import count, grouped
from torch_testing_ext._tests.outcomes import VERDICTS, TestOutcome
from torch_testing_ext.runner.model import FinishedTest, Summary

from . import wording
from .brief_failures import brief_details, by_cause, failing_attempts, heading_of_group, plain, styled
from .console_layout import ConsoleLayout, table
from .console_style import STYLE_OF, STYLE_OF_VERDICT, Style, Styler
from .sections import SECTIONS

# With more names, the command would be too long to read.
MOST_NAMES_IN_SUMMARY = 8
MOST_UNFINISHED = 10
# Fewer than a screen has lines: each has two.
MOST_WARNINGS = 10
# A text with its style.
_Cell = tuple[Style, str]


@dataclass
class FinalSummary:
    """The sections of the summary, each as lines; empty if there is nothing to say."""

    summary: Summary
    styler: Styler
    # The number of tests; 0 for all, as pytest has it, and None for no list.
    slowest: int | None
    # Runs the tests whose names are appended to it.
    command: str
    # They came after `summary` was made.
    late_warnings: Sequence[str]
    layout: ConsoleLayout
    # Whether it has the details of each failure, which have not been printed before.
    in_full: bool
    # The page with the whole run, if there is one.
    page: Path | None = None

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
            *(part for each in SECTIONS for part in each.in_summary(self.summary, self._name, self.styler)),
            self._unfinished(),
            self._warnings_of_tests(),
            self._warnings(),
            self._error(),
            self._rerun_command(),
            # It has no colour, since programs read it, too.
            [*self._address(), self.summary.last_line],
        ]
        texts = ["\n".join(lines) for lines in sections if any(lines)]
        return "\n\n".join(texts) + "\n"

    def _failures(self) -> list[str]:
        """The name of each on a line, and its cause below; those with one cause together.

        A single failure has been shown, and the command that runs it again names it; a flaky one has not.
        """
        lines: list[str] = []
        if [failure.outcome is TestOutcome.FLAKY for failure in self.summary.failures] == [False]:
            return lines
        for group in by_cause(self.summary.failures, self.summary.policy):
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
        attempt = failing_attempts(group[0], self.summary.policy)[-1]
        cause = wording.reason(attempt)
        if len(group) == 1:
            yield self._title(group[0])
            yield from self.layout.wrapped(cause, "    ")
            return
        yield from self.layout.wrapped(f"{heading_of_group(group)}: {cause}", "", self.styler)
        shown = group
        if len(group) > MOST_NAMES_IN_SUMMARY:
            # The line with the number of the others is one of them.
            shown = group[: MOST_NAMES_IN_SUMMARY - 1]
        for result in shown:
            yield f"    {self._name(result)}"
        if len(shown) < len(group):
            yield f"    and {len(group) - len(shown)} more"

    def _title(self, result: FinishedTest) -> str:
        outcome = wording.outcome_in_words(result)
        return self.styler(Style.RED, f"{outcome}: {self._name(result)}")

    def _failure(self, result: FinishedTest) -> Iterator[str]:
        """The lines of a failure with all details; those of attempts that failed in the same way once."""
        yield self.layout.rule("=")
        yield self._title(result)
        details = {}
        for attempt in failing_attempts(result, self.summary.policy):
            details[attempt.number] = brief_details(attempt, self.layout)
        different = grouped((without_accidents(plain(lines)), number) for number, lines in details.items())
        for numbers in different.values():
            yield self.layout.rule("-")
            if len(result.attempts) > 1:
                attempts = "attempt" if len(numbers) == 1 else "attempts"
                yield f"{attempts} {', '.join(map(str, numbers))}:"
            yield styled(details[numbers[0]], self.layout, self.styler)

    def _outcomes(self) -> list[str]:
        """The numbers of the last line, with a line for each that counts several outcomes, or another one."""
        rule = self.layout.rule("=")
        took = f" in {wording.duration(self.summary.seconds)}"
        if not self.summary.finished:
            return [rule, f"no tests ran{took}"]
        counts: defaultdict[TestOutcome, Counter[TestOutcome]] = defaultdict(Counter)
        for result in self.summary.finished:
            verdict = self.summary.policy.verdict_on(result)
            counts[verdict][result.outcome] += 1
        totals = []
        lines = []
        for verdict in VERDICTS:
            outcomes = counts[verdict]
            if not outcomes:
                continue
            total = f"{outcomes.total()} {verdict.value}"
            totals.append((STYLE_OF_VERDICT[verdict], total))
            if set(outcomes) == {verdict}:
                continue
            cells = []
            for outcome in TestOutcome:
                if outcomes[outcome]:
                    cells.append((STYLE_OF[outcome], _of_them(outcomes, outcome)))
            lines += self._row(cells, start=f"  {verdict.value}: ")
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
        if self.slowest is None:
            return []
        ran = [result for result in self.summary.finished if result.outcome is not TestOutcome.SKIPPED]
        ran.sort(key=lambda result: -result.seconds)
        rows = []
        for result in ran[: self.slowest or None]:
            rows.append((wording.duration(result.seconds), self._name(result)))
        return table("slowest:", rows)

    def _skipped(self) -> list[str]:
        rows = []
        for reason, number in wording.skip_reasons(self.summary):
            rows.append((str(number), reason))
        return table("skipped:", rows)

    def _with_outcome(self, outcome: TestOutcome) -> list[FinishedTest]:
        return [result for result in self.summary.finished if result.outcome is outcome]

    def _flaky(self) -> list[str]:
        rows = []
        for result in self._with_outcome(TestOutcome.FLAKY):
            attempts = count(len(result.attempts), "attempt")
            name = self._name(result)
            rows.append((attempts, f"{name}\n{_first_failure(result)}"))
        return table("flaky:", rows)

    def _leaked(self) -> list[str]:
        of_processes = []
        of_memory = []
        for result in self._with_outcome(TestOutcome.LEAKED):
            name = self._name(result)
            processes = result.last.end.leftovers
            if processes:
                of_processes.append((str(len(processes)), "\n".join([name, *processes])))
            else:
                of_memory.append((f"devices {','.join(result.last.lease.devices)}", name))
        return [
            *table("left processes running (now terminated):", of_processes),
            *table("left memory of a device in use:", of_memory),
        ]

    def _unfinished(self) -> list[str]:
        waiting = self.summary.unfinished
        if not waiting:
            return []
        tests = count(len(waiting), "test")
        lines = [f"{tests} did not finish: {wording.why_unfinished(self.summary)}"]
        for test in waiting[:MOST_UNFINISHED]:
            name = wording.printable(str(test.id))
            lines.append(f"  {name}")
        if len(waiting) > MOST_UNFINISHED:
            lines.append(f"  and {len(waiting) - MOST_UNFINISHED} more")
        return lines

    def _error(self) -> list[str]:
        if not self.summary.error:
            return []
        heading = self.styler(Style.RED, "internal error of the runner:")
        return [heading, wording.printable(self.summary.error).rstrip()]

    def _warnings_of_tests(self) -> list[str]:
        """Each different warning of Python's once, with the tests that raised it."""
        raised = ((text, self._name(test)) for test in self.summary.finished for text in test.last.end.raised_warnings)
        tests_of = grouped(raised)
        rows = []
        for text, names in [*tests_of.items()][:MOST_WARNINGS]:
            more = f" and {count(len(names) - 1, 'more test')}" if len(names) > 1 else ""
            rows.append((str(len(names)), f"{wording.printable(text)}\n{names[0]}{more}"))
        if len(tests_of) > MOST_WARNINGS:
            rows.append(("", f"and {count(len(tests_of) - MOST_WARNINGS, 'other warning')}"))
        return table("warnings of tests:", rows)

    def _warnings(self) -> list[str]:
        unique = dict.fromkeys((*self.summary.warnings, *self.late_warnings))
        lines = []
        for warning in unique:
            words = f"warning: {wording.printable(warning)}"
            lines.append(self.styler(Style.YELLOW, words))
        return lines

    def _rerun_command(self) -> list[str]:
        """The command that runs the tests again that failed or did not finish."""
        failed = [result.test.id for result in self.summary.failures]
        unfinished = [test.id for test in self.summary.unfinished]
        names = list(dict.fromkeys((*failed, *unfinished)))
        if not names:
            return []
        if len(names) <= MOST_NAMES_IN_SUMMARY:
            words = [shell_words.test_as_argument(str(name)) for name in names]
        else:
            # All names would be too long to read.
            files = [shell_words.test_as_argument(name.file) for name in names]
            words = list(dict.fromkeys(files))
            if not unfinished:
                words.insert(0, "--last-failed")
        verb = "rerun" if failed else "run"
        tests = "it" if len(names) == 1 else "them"
        command = " ".join([self.command, *words])
        return [f"to {verb} {tests}:", f"  {command}"]

    def _address(self) -> list[str]:
        """The page of a run that failed, as terminals and CI open it."""
        has_failed = bool(self.summary.failures or self.summary.error)
        if not has_failed or self.page is None or not self.page.exists():
            return []
        return [f"report: {self.page.absolute().as_uri()}"]

    def _name(self, result: FinishedTest) -> str:
        return wording.name(result.last, self._repetitions)


def _of_them(counts: Counter[TestOutcome], outcome: TestOutcome) -> str:
    """`2 errors`; of the failures, `7 assertion failures`, since all of them have failed."""
    if outcome is TestOutcome.FAILED:
        return count(counts[outcome], "assertion failure")
    if outcome is TestOutcome.ERROR:
        return count(counts[outcome], outcome.value)
    return f"{counts[outcome]} {outcome.value}"


def _first_failure(result: FinishedTest) -> str:
    attempt = result.attempts[0]
    return f"{attempt.outcome.value}: {wording.title(attempt)}"
