"""Failures as a screen shows them: each in a few lines, and those with one cause once. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from torch_testing_ext._collectives.failure import MOST_LINES, WIDTH, Line, LineKind, height
from torch_testing_ext._process import shell
from torch_testing_ext._process.words import grouped
from torch_testing_ext.launch.folding import without_accidents
from torch_testing_ext.launch.screen import kind_of_value

from ..model import Attempt, Category, FinishedTest, Policy
from . import text
from .terminal import ConsoleLayout, Style, Styler

LAST_LINES = 20
_OUTPUT = "last lines of the output of the test's process:"


def cause_of(attempt: Attempt) -> Hashable | None:
    """The parts that failures with one cause have in common: the title without the fixture, and the place.

    None if the place is not known, for then no other failure is known to have the cause, too.
    """
    failure = attempt.failure
    if failure is None or (site := failure.place) is None:
        return None
    return without_accidents(text.first_line(failure.title)), site


def by_cause(failures: Iterable[FinishedTest], policy: Policy) -> list[list[FinishedTest]]:
    """Failures with one cause together, in the order of each group's first."""
    groups = grouped((cause_of(failing_attempts(one, policy)[-1]) or id(one), one) for one in failures)
    return list(groups.values())


def heading(group: Sequence[FinishedTest]) -> str:
    """A group of failures in words, with one name if it has one."""
    return f"{text.count(len(group), 'test')} failed for one reason" if len(group) > 1 else ""


def failing_attempts(one: FinishedTest, policy: Policy) -> list[Attempt]:
    """The attempts that failed: a test that finally passed may still count as failed. At least one."""
    failing = [attempt for attempt in one.attempts if policy.verdict(attempt.outcome) is Category.FAILED]
    return failing or [one.last]


def details(attempt: Attempt, layout: ConsoleLayout) -> list[Line]:
    """Why a test failed, on one screen; or, with `layout.whole`, all that is known. The first line is the title."""
    output = text.printable(attempt.output[-20_000:]).rstrip().splitlines()[-LAST_LINES:]
    remarks = [f"it ran on {node}"] if (node := text.node_of(attempt.lease)) else []
    remarks += text.leftovers(attempt)
    if layout.whole:
        parts = [layout.message(text.account(attempt)), *remarks]
        parts += ["\n".join([_OUTPUT, *output])] if output else []
        return [Line(line, kind_of_value(line)) for line in "\n\n".join(parts).split("\n")]
    show = f"{layout.show} {shell.name(str(attempt.test.id))}" if layout.show else ""
    failure = attempt.failure
    if failure is not None and failure.text is None:
        # Ranks that the test has started itself do not know its name.
        lines = [Line(text.printable(line), kind) for line, kind in failure.lines(show)]
        return [*lines, *map(Line, remarks)]
    again = failure.rerun_command if failure is not None else ""
    end = [*map(Line, remarks)]
    end += [Line(f"all of it:  {show}", LineKind.COMMAND)] if show else []
    end += [Line(f"run again:  {again}", LineKind.COMMAND)] if again else []
    room = MOST_LINES - height(plain(end)) - bool(end)
    columns = min(WIDTH, layout.columns or WIDTH)
    shown = _ends(text.screen(attempt).strip("\n").splitlines(), room, columns)
    left = room - height("\n".join(shown), columns)
    if output and left > 2:
        shown += ["", _OUTPUT, *(line[:columns] for line in output[2 - left :])]
    return [*map(Line, shown), *([Line("")] if end else []), *end]


def plain(lines: Iterable[Line]) -> str:
    return "\n".join(line.text for line in lines)


def _ends(lines: Sequence[str], room: int, columns: int) -> list[str]:
    """The first line, and as many of the last ones as there is room for."""
    if height("\n".join(lines), columns) <= room:
        return list(lines)
    first, rest = lines[0][: 3 * columns], [line[: 2 * columns] for line in lines[1:]]
    used = height(first, columns) + 1
    kept: list[str] = []
    while rest and used + height(rest[-1] or " ", columns) <= room:
        used += height(rest[-1] or " ", columns)
        kept.insert(0, rest.pop())
    return [first, *([f"  ... {text.count(len(rest), 'line')} more ..."] if rest else []), *kept]


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
