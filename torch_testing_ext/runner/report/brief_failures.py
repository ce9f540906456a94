"""Failures as a screen shows them: each in a few lines, and those with one cause once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from torch_testing_ext._collectives.failure import MOST_SCREEN_LINES, WIDTH, Line, LineKind, height, kind_of_value
from torch_testing_ext._process import shell_words
from torch_testing_ext._process.same_texts import without_accidents
from torch_testing_ext._process.words import count, grouped
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import Attempt, FinishedTest, Policy

from . import wording
from .console_layout import ConsoleLayout
from .console_style import Style, Styler

LAST_LINES = 20
_OUTPUT = "last lines of the test's output:"


def cause_of(attempt: Attempt) -> Hashable | None:
    """The parts that failures with one cause have in common: the title without the fixture, and the place.

    None if the place is not known, for then no other failure is known to have the cause, too. Files that cannot be
    collected have it in their text: of their conftest file, for example.
    """
    failure = attempt.failure
    if failure is None and not attempt.test.id.dotted:
        return attempt.end.message or None
    if failure is None or failure.place is None:
        return None
    return without_accidents(wording.first_line(failure.title)), failure.place


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
    return f"{count(len(group), 'test')} failed for the same reason" if len(group) > 1 else ""


def failing_attempts(finished: FinishedTest, policy: Policy) -> list[Attempt]:
    """The attempts that failed: a test that finally passed may still count as failed. At least one."""
    failing = [attempt for attempt in finished.attempts if policy.verdict(attempt.outcome) is TestOutcome.FAILED]
    return failing or [finished.last]


def brief_details(attempt: Attempt, layout: ConsoleLayout) -> list[Line]:
    """Why a test failed, on one screen; or, with `layout.whole`, all that is known. The first line is the title."""
    output = wording.printable(attempt.output[-20_000:]).rstrip().splitlines()[-LAST_LINES:]
    remarks = []
    node = wording.node_of(attempt.lease)
    if node:
        remarks.append(f"ran on {node}")
    remarks += wording.leftovers(attempt)
    if layout.whole:
        return _whole_details(layout.message(wording.account(attempt)), remarks, output)
    show = f"{layout.show} {shell_words.test_as_argument(str(attempt.test.id))}" if layout.show else ""
    failure = attempt.failure
    if failure is not None and failure.text is None:
        # Ranks that the test has started itself do not know its name.
        lines = [Line(wording.printable(line), kind) for line, kind in failure.lines(show)]
        return [*lines, *map(Line, remarks)]
    end = [*map(Line, remarks)]
    if show:
        end.append(Line(f"details:    {show}", LineKind.COMMAND))
    if failure is not None and failure.rerun_command:
        end.append(Line(f"run again:  {failure.rerun_command}", LineKind.COMMAND))
    room = MOST_SCREEN_LINES
    if end:
        room -= height(plain(end)) + 1
        end.insert(0, Line(""))
    columns = min(WIDTH, layout.columns or WIDTH)
    lines_of_text = _ends(wording.screen(attempt).strip("\n").splitlines(), room, columns)
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
        return [first, f"  ... {count(left_out, 'line')} more ...", *last]
    return [first, *last]


_STYLE_OF_LINE = {
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
        style = _STYLE_OF_LINE.get(line.kind)
        shown.append(styler(style, line.text) if style else line.text)
    return "\n".join(shown)
