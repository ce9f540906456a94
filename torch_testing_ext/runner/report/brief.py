"""Failures as a screen shows them: each in a few lines, and those with one cause once. Pure."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence

from torch_testing_ext._process import shell
from torch_testing_ext._process.kept_accounts import parts
from torch_testing_ext._process.words import grouped
from torch_testing_ext.launch.folding import without_accidents
from torch_testing_ext.launch.screen import MOST_LINES, WIDTH, LineKind, height, kind_of

from ..model import Attempt, Category, FinishedTest, Policy
from . import text
from .terminal import ConsoleLayout, Style, Styler

LAST_LINES = 20
_ALONE = "\n\nTo run it alone:\n  "
_OUTPUT = "last lines of the output of the test's process:"

_TO_SHOW = re.compile(r"^all of it:  .*$", re.MULTILINE)
_FIXTURE = re.compile(r"^(?:after the test: )?(?:setUp|tearDown)\w* \([^)]*\): ")
_PLACE = re.compile(r"  (\S+\.py:\d+)(?: in |$)", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (\S+)|^(\S+\.py:\d+): \w', re.MULTILINE)


def cause_of(attempt: Attempt) -> Hashable | None:
    """The parts that the messages of failures with one cause have in common: the first line, and the place.

    None if the place is not known, for then no other failure is known to have the cause, too.
    """
    screen, account = parts(attempt.message)
    title = without_accidents(_FIXTURE.sub("", text.title(screen)))
    if screen != account:
        place: object = next(iter(_PLACE.findall(screen.partition("\n")[2])), None)
    else:
        place = next(iter(_FRAME.findall(account)[::-1]), None)
    return (title, place) if place else None


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


def details(attempt: Attempt, layout: ConsoleLayout) -> str:
    """Why a test failed, on one screen; or, with `layout.whole`, all that its message says."""
    output = text.printable(attempt.output[-20_000:]).rstrip().splitlines()[-LAST_LINES:]
    remarks = [f"it ran on {node}"] if (node := text.node_of(attempt.lease)) else []
    remarks += text.leftovers(attempt)
    if layout.whole:
        parts_ = [layout.message(text.account(attempt)), *remarks]
        return "\n\n".join([*parts_, "\n".join([_OUTPUT, *output])] if output else parts_)
    said = text.screen(attempt).partition(_ALONE)[0]
    alone = text.printable(attempt.message).rpartition(_ALONE)[2] if _ALONE in attempt.message else ""
    has_account = text.screen(attempt) != text.account(attempt)
    show = f"all of it:  {layout.show} {shell.name(str(attempt.test.id))}" if layout.show else ""
    end = [*remarks, *([show] if show else []), *([f"run again:  {alone}"] if alone else [])]
    room = MOST_LINES - height("\n".join(end)) - bool(end)
    lines = said.strip("\n").splitlines()
    columns = min(WIDTH, layout.columns or WIDTH)
    if has_account:
        more = [*remarks, *([f"run again:  {alone}"] if alone and "run again:  " not in said else [])]
        # Ranks that the test has started itself do not know its name.
        said = _TO_SHOW.sub(lambda found: show or found[0], said)
        return "\n".join([said, *more])
    shown = _ends(lines, room, columns)
    left = room - height("\n".join(shown), columns)
    if output and left > 2:
        shown += ["", _OUTPUT, *(line[:columns] for line in output[2 - left :])]
    return "\n".join([*shown, *([""] if end else []), *end])


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


def shown(words: str, layout: ConsoleLayout, styler: Styler) -> str:
    """The details of a failure as a screen has them: the title broken between words, and colours."""
    title, *lines = words.split("\n")
    titles = layout.wrapped(title, "") if layout.columns else [title]
    styles = [*(Style.BOLD for _ in titles), *(_STYLES.get(kind_of(line)) for line in lines)]
    pairs = zip(styles, [*titles, *lines], strict=True)
    return "\n".join(styler(style, line) if style else line for style, line in pairs)
