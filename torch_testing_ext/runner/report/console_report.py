"""The report that scrolls: failures in brief, the summary, lists, annotations, `show`."""

from __future__ import annotations

import html
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from torch_testing_ext._collectives.failure import MOST_SCREEN_LINES, WIDTH, Line, LineKind, height
from torch_testing_ext._process import kept_failures, shell_words, user_commands
from torch_testing_ext._process.logs import cut_middle, warnings_once, without_accidents
from torch_testing_ext._process.words import grouped
from torch_testing_ext.launch.judging import kind_of_value
from torch_testing_ext.runner import model
from torch_testing_ext.runner.model import (
    Attempt,
    Category,
    Event,
    FinishedTest,
    Policy,
    RunEnded,
    Summary,
    TestId,
    TestOutcome,
)
from torch_testing_ext.runner.options import StatusLevel, Verbosity

from . import text
from .journal import JournalError, find_journal, read_journal
from .text import STYLE_OF, STYLE_OF_CATEGORY, ConsoleLayout, LineWriter, Style, Styler

# --------------------------------------------------------------------------------------------------------------------
# Failures as a screen shows them: each in a few lines, and those with one cause once. Pure.

LAST_LINES = 20
_OUTPUT = "last lines of the test's output:"


def cause_of(attempt: Attempt) -> Hashable | None:
    """The parts that failures with one cause have in common: the title without the fixture, and the place.

    None if the place is not known, for then no other failure is known to have the cause, too.
    """
    failure = attempt.failure
    if failure is None or failure.place is None:
        return None
    return without_accidents(text.first_line(failure.title)), failure.place


def by_cause(failures: Iterable[FinishedTest], policy: Policy) -> list[list[FinishedTest]]:
    """Failures with one cause together, in the order of each group's first."""

    def cause(failure: FinishedTest) -> Hashable:
        last = failing_attempts(failure, policy)[-1]
        # No other failure has this one.
        return cause_of(last) or id(failure)

    groups = grouped((cause(failure), failure) for failure in failures)
    return list(groups.values())


def heading_of_group(group: Sequence[FinishedTest]) -> str:
    """A group of failures in words, with one name if it has one."""
    return f"{text.count(len(group), 'test')} failed for the same reason" if len(group) > 1 else ""


def failing_attempts(finished: FinishedTest, policy: Policy) -> list[Attempt]:
    """The attempts that failed: a test that finally passed may still count as failed. At least one."""
    failing = [attempt for attempt in finished.attempts if policy.verdict(attempt.outcome) is Category.FAILED]
    return failing or [finished.last]


def brief_details(attempt: Attempt, layout: ConsoleLayout) -> list[Line]:
    """Why a test failed, on one screen; or, with `layout.whole`, all that is known. The first line is the title."""
    output = text.printable(attempt.output[-20_000:]).rstrip().splitlines()[-LAST_LINES:]
    remarks = []
    node = text.node_of(attempt.lease)
    if node:
        remarks.append(f"ran on {node}")
    remarks += text.leftovers(attempt)
    if layout.whole:
        return _whole_details(layout.message(text.account(attempt)), remarks, output)
    show = f"{layout.show} {shell_words.test_as_argument(str(attempt.test.id))}" if layout.show else ""
    failure = attempt.failure
    if failure is not None and failure.text is None:
        # Ranks that the test has started itself do not know its name.
        lines = [Line(text.printable(line), kind) for line, kind in failure.lines(show)]
        return [*lines, *map(Line, remarks)]
    end = [*map(Line, remarks)]
    if show:
        end.append(Line(f"all of it:  {show}", LineKind.COMMAND))
    if failure is not None and failure.rerun_command:
        end.append(Line(f"run again:  {failure.rerun_command}", LineKind.COMMAND))
    room = MOST_SCREEN_LINES
    if end:
        room -= height(plain(end)) + 1
        end.insert(0, Line(""))
    columns = min(WIDTH, layout.columns or WIDTH)
    lines_of_text = _ends(text.screen(attempt).strip("\n").splitlines(), room, columns)
    left = room - height("\n".join(lines_of_text), columns)
    # An empty line and the heading come first.
    if output and left > 2:
        lines_of_text += ["", _OUTPUT, *(line[:columns] for line in output[2 - left :])]
    return [*map(Line, lines_of_text), *end]


def _whole_details(message: str, remarks: Sequence[str], output: Sequence[str]) -> list[Line]:
    """All that is known of a failure, in parts with an empty line between them."""
    parts = [message, *remarks]
    if output:
        parts.append("\n".join([_OUTPUT, *output]))
    lines = "\n\n".join(parts).split("\n")
    return [Line(line, kind_of_value(line)) for line in lines]


def plain(lines: Iterable[Line]) -> str:
    return "\n".join(line.text for line in lines)


def _ends(lines: Sequence[str], room: int, columns: int) -> list[str]:
    """The first line, and as many of the last ones as there is room for."""
    if height("\n".join(lines), columns) <= room:
        return list(lines)
    first = lines[0][: 3 * columns]
    rest = [line[: 2 * columns] for line in lines[1:]]
    # The line with the number of the others is one of them.
    used = height(first, columns) + 1
    last: list[str] = []
    for line in reversed(rest):
        used += height(line or " ", columns)
        if used > room:
            break
        last.insert(0, line)
    left_out = len(rest) - len(last)
    if left_out:
        return [first, f"  ... {text.count(left_out, 'line')} more ...", *last]
    return [first, *last]


_STYLES = {
    LineKind.FAULT: Style.BOLD,
    LineKind.GOT: Style.RED,
    LineKind.EXPECTED: Style.GREEN,
    LineKind.COMMAND: Style.FAINT,
}


def styled(details: Sequence[Line], layout: ConsoleLayout, styler: Styler) -> str:
    """The details of a failure as a screen has them: the title broken between words, and colours."""
    title, *lines = details
    titles = layout.wrapped(title.text, "") if layout.columns else [title.text]
    shown = [styler(Style.BOLD, line) for line in titles]
    for line in lines:
        style = _STYLES.get(line.kind)
        shown.append(styler(style, line.text) if style else line.text)
    return "\n".join(shown)


# --------------------------------------------------------------------------------------------------------------------
# The final summary of a run: all failures, then counts and lists, and a last line of fixed format. Pure.

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
            *self._drills(),
            self._not_drilled(),
            self._not_reached(),
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
        cause = text.reason(attempt)
        if len(group) == 1:
            yield self._title(group[0])
            yield from self.layout.wrapped(cause, "    ")
            return
        yield from self.layout.wrapped(f"{heading_of_group(group)}: {cause}", "", self.styler)
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
            *_table("left processes running (now terminated):", of_processes),
            *_table("left memory of a device in use:", of_memory),
        ]

    def _drills(self) -> Iterator[list[str]]:
        """The matrix of each test of a drill, and what hangs it."""
        for result, report in text.sweeps(self.summary):
            if lines := text.drill_lines(report):
                told = (line if style is None else self.styler(style, line) for style, line in lines)
                yield [f"drill of {self._name(result)}:", *told]

    def _not_drilled(self) -> list[str]:
        why = grouped((report.why_not, self._name(result)) for result, report in text.sweeps(self.summary))
        rows = [(str(len(names)), "\n".join([reason, *names])) for reason, names in why.items() if reason]
        return _table("not drilled:", rows)

    def _not_reached(self) -> list[str]:
        names = text.not_reached(self.summary)
        return [f"no run has reached: {', '.join(map(text.printable, names))}"] if names else []

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
        heading = self.styler(Style.RED, "internal error of the runner:")
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


# --------------------------------------------------------------------------------------------------------------------
# The scrolling console report: one line per test, failures as they happen, and a summary at the end.
#
# Each failure is printed once in full: when it happens, or with -q at the end. In the other place it is one line.

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
    # Without its columns: the user may resize the terminal during the run.
    layout: ConsoleLayout = field(default_factory=ConsoleLayout)
    # The columns of the terminal now.
    columns: Callable[[], int | None] = lambda: None
    level: StatusLevel = StatusLevel.ALL
    _total: int = 0
    _done: int = 0
    _repetitions: int = 1
    # The test whose output was shown last.
    _last_shown: TestId | None = None
    _partial_lines: dict[TestId | None, str] = field(default_factory=dict)
    _warnings: list[str] = field(default_factory=list)
    # With the first test that failed for each.
    _causes: dict[Hashable, TestId] = field(default_factory=dict)
    # Failures of tests that are retried.
    _shown: dict[tuple[TestId, int], list[str]] = field(default_factory=dict)

    def on_event(self, event: model.Event) -> None:
        """Print what the user has to know of an event."""
        match event:
            case model.RunBegan():
                self._total = event.results
                self._repetitions = event.repetitions
                self._say(opening(event))
            case model.TestIsSlow() if self.level.shows(StatusLevel.SLOW):
                took = text.duration(event.seconds)
                where = text.place(event.lease)
                self._say(f"slow: {event.test.id} has been running for {took} on {where}", Style.YELLOW)
            case model.AttemptEnded(attempt, retry=True) if self.level.shows(StatusLevel.RETRY):
                self._attempt(attempt, attempt.outcome, f"{attempt.outcome.value}, retrying", failed=True)
            case model.TestFinished(finished):
                self._test_finished(finished)
            case model.Output(test, new):
                self._stream(test, new)
            case model.WaitingForDevices(devices, owners):
                used_by = "; ".join(text.printable(owner) for owner in owners)
                if not used_by:
                    used_by = "another run"
                self._say(f"waiting for {text.count(len(devices), 'device')}, used by {used_by}", Style.YELLOW)
            case model.StatusRequested():
                self.writer.write(running_tests(event))
            case model.Warned(message):
                self._warnings.append(message)
                self._say(f"warning: {text.printable(message)}", Style.YELLOW)
            case model.Stopping(reason):
                self._say(f"no new tests will start: {text.printable(reason)}", Style.YELLOW)
            case model.RunEnded(summary):
                self._run_ended(summary)

    def _test_finished(self, finished: FinishedTest) -> None:
        self._done += 1
        # With --repeat=until-failure, the number of repetitions is unknown.
        self._total = max(self._total, self._done)
        failed = self.policy.verdict_on(finished) is Category.FAILED
        level = StatusLevel.FAIL if failed else _LEVEL_OF.get(finished.outcome, StatusLevel.PASS)
        is_quiet = self.detail is Verbosity.QUIET and not failed
        if self.level.shows(level) and not is_quiet:
            last = finished.last
            last_failed = self.policy.verdict(last.outcome) is Category.FAILED
            words = text.outcome_in_words(finished)
            self._attempt(last, finished.outcome, words, failed and last_failed)
        self._shown.pop((finished.test.id, finished.last.repetition), None)

    def _attempt(self, attempt: Attempt, outcome: TestOutcome, word: str, failed: bool) -> None:
        """Print the line of an attempt, and the details of a failure below it."""
        self._flush(attempt.test.id)
        took = "" if outcome is TestOutcome.SKIPPED else text.duration(attempt.seconds)
        digits = len(str(self._total))
        number = f"[{self._done:>{digits}}/{self._total}]  "
        word = f"{word:<8}"
        rest = f"  {took:>9}  {text.name(attempt, self._repetitions)}"
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
        title = text.reason(attempt)
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
        name = text.one_line(first.method or str(first))
        return [], f"for the same reason as {name}"

    def _remark(self, attempt: Attempt) -> str:
        if attempt.outcome is TestOutcome.SKIPPED:
            return f": {text.title(attempt)}"
        if self.detail is not Verbosity.VERBOSE:
            return ""
        facts = (text.place(attempt.lease), text.memory(attempt))
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
        )
        self.writer.write(f"\n{sections}")

    def _layout_now(self) -> ConsoleLayout:
        return replace(self.layout, columns=self.columns())

    def _say(self, line: str, style: Style | None = None) -> None:
        if style is not None:
            line = self.styler(style, line)
        self.writer.write(f"{line}\n")


def opening(run: model.RunBegan) -> str:
    """The first line of the report."""
    file_names = {test.id.file for test in run.tests}
    tests = text.count(len(run.tests), "test")
    files = text.count(len(file_names), "file")
    resources = " and ".join(text.resources(run))
    first = f"{tests} from {files} on {resources}"
    if run.nodes:
        nodes = text.count(len(run.nodes), "node")
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


def running_tests(status: model.StatusRequested) -> str:
    """The running tests with their times, devices or slots, and stacks."""
    if not status.running:
        return "no test is running\n"
    lines = [f"{text.count(len(status.running), 'test')} running:"]
    for running in status.running:
        took = text.duration(running.seconds)
        where = text.place(running.lease) or "no slot"
        lines.append(f"  {took:>9}  {running.test.id}  on {where}")
        stacks = text.printable(running.stacks).rstrip()
        if stacks:
            lines.append(textwrap.indent(stacks, " " * 6))
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------------------------
# The failures of a run in a workflow of GitHub: annotations next to the source, and the summary of the step.

# GitHub shows at most this many per step.
MOST_ANNOTATIONS = 10
# Characters of a message, and of the summary of a step, of which GitHub takes a MiB.
LONGEST_ANNOTATION = 4_000
LONGEST_SUMMARY = 500_000


@dataclass
class GitHub:
    """Writes an annotation for each cause of failures, and appends to the file with the summary of the step."""

    writer: LineWriter
    step_summary: Path | None = None

    def on_event(self, event: Event) -> None:
        if not isinstance(event, RunEnded):
            return
        summary = event.summary
        groups = by_cause(summary.failures, summary.policy)
        annotations = [annotation(group, summary.policy) for group in groups[:MOST_ANNOTATIONS]]
        self.writer.write("".join(annotations))
        if self.step_summary is not None:
            with suppress(OSError), self.step_summary.open("a", encoding="utf-8") as file:
                file.write(step_summary(summary, groups))


def annotation(group: Sequence[FinishedTest], policy: Policy) -> str:
    """The workflow command that creates the annotation of failures with one cause, at the line of the culprit."""
    first = group[0]
    attempt = failing_attempts(first, policy)[-1]
    message = text.screen(attempt).strip()
    facts = {
        "file": first.test.id.file,
        "line": str(_line(attempt) or first.test.line or 1),
        "title": heading_of_group(group) or f"{first.outcome.value}: {first.test.id}",
    }
    where = ",".join(f"{name}={_escape(value, inside=',:')}" for name, value in facts.items())
    shown = cut_middle(message, LONGEST_ANNOTATION) or first.outcome.value
    return f"::error {where}::{_escape(shown)}\n"


def _line(attempt: Attempt) -> int | None:
    """The line of the test's file where it failed, the culprit's first."""
    name = PurePosixPath(attempt.test.id.file).name
    if attempt.failure is None:
        return None
    for row in attempt.failure.rows:
        if row.site is not None and PurePosixPath(row.site.file).name == name:
            return row.site.line
    return None


def step_summary(summary: Summary, groups: Sequence[Sequence[FinishedTest]]) -> str:
    """The run in Markdown: the counts, and each cause of failures with its tests."""
    parts = [f"### {summary.last_line} in {text.duration(summary.seconds)}\n"]
    for group in groups:
        attempt = failing_attempts(group[0], summary.policy)[-1]
        heading = heading_of_group(group) or text.test_name(group[0].test.id)
        title = html.escape(heading, quote=False)
        cause = html.escape(text.reason(attempt), quote=False)
        names = ""
        if len(group) > 1:
            names = "".join(f"- `{text.test_name(result.test.id)}`\n" for result in group)
        message = text.screen(attempt).replace("```", "~~~")
        parts.append(
            f"<details><summary><b>{title}</b>: {cause}</summary>\n\n{names}\n```\n{message}\n```\n</details>\n"
        )
    return cut_middle("\n".join(parts), LONGEST_SUMMARY) + "\n"


def _escape(words: str, inside: str = "") -> str:
    special = "%\r\n" + inside
    escaped = ""
    for letter in words:
        escaped += f"%{ord(letter):02X}" if letter in special else letter
    return escaped


# --------------------------------------------------------------------------------------------------------------------
# `run_test.py show`: all that is known of failures, from the journal of a run and from the files that tests keep.


def accounts_of_failures(places: Sequence[Path], names: Sequence[str]) -> Iterator[str]:
    """The newest account of each failed test in journals and folders with a cache; of all tests without names."""
    wanted = [text.one_line(name) for name in names]
    newest: dict[str, tuple[float, str]] = {}
    for place in places:
        for test, account, at in (*_of_run(place), *kept_failures.kept_reports(place)):
            if not _is_named(test, wanted):
                continue
            before, _ = newest.get(test, (0.0, ""))
            if before < at:
                newest[test] = at, account
    for test, (_, account) in newest.items():
        rule = "=" * min(len(test), 80)
        yield f"{test}\n{rule}\n{account}\n"


def _of_run(place: Path) -> Iterator[tuple[str, str, float]]:
    """The name, the account and the time of each test that has failed in a run."""
    try:
        path = find_journal(place)
        run = read_journal(path)
    except (JournalError, OSError):
        return
    at = path.stat().st_mtime
    policy = run.header.policy
    for result in run.summary.finished:
        verdicts = {policy.verdict(attempt.outcome) for attempt in result.attempts}
        if Category.FAILED in verdicts:
            name = text.test_name(result.test.id)
            account = "\n\n".join(_account(attempt) for attempt in result.attempts)
            yield name, account, at


def _account(attempt: Attempt) -> str:
    took = text.duration(attempt.seconds)
    parts = [f"{attempt.outcome.value} after {took}, attempt {attempt.number}", text.account(attempt)]
    for heading, words in text.logs(attempt):
        parts.append(f"output of {heading}:\n{warnings_once(words)}")
    parts += text.leftovers(attempt)
    return "\n\n".join(part for part in parts if part)


def _is_named(test: str, names: Sequence[str]) -> bool:
    """Is the test one of these? A name may lack the file, the class or the parts that the test's folders have."""
    if not names:
        return True
    for name in names:
        endings = (f"::{name}", f".{name}", f"/{name}")
        for spelling in (test, test.replace("::", ".")):
            if spelling == name or spelling.endswith(endings):
                return True
    return False
