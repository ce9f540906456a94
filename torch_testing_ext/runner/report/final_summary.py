"""What is said when a run is over: all failures again, then the summary, whose last line is always the same. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..model import Attempt, FinishedTest, Summary, TestOutcome
from . import text
from .terminal import STYLE_OF, Style, Styler

WIDTH = 100
LAST_LINES = 20
# More names than these make a command that nobody wants to read.
MOST_NAMES = 8


def account(attempt: Attempt) -> str:
    """Why a test failed: its message, in the form of the launch layer, and what else it left to read."""
    parts = [text.printable(attempt.message).strip("\n")]
    lines = text.printable(attempt.output[-20_000:]).rstrip().splitlines()[-LAST_LINES:]
    if lines:
        parts.append("last lines of output of the test's own process:\n" + "\n".join(lines))
    if attempt.leftovers:
        parts.append(f"left running, and ended: {'; '.join(map(text.printable, attempt.leftovers))}")
    return "\n\n".join(part for part in parts if part)


def closing(summary: Summary, style: Styler, slowest: int, command: str, warnings: Sequence[str] = ()) -> str:
    """`command` runs the tests that are named after it; `warnings` came too late for the summary."""
    repetitions = 1 + max((one.last.repetition for one in summary.settled), default=0)
    say = _Closing(summary, style, repetitions, command)
    parts = [say.failures(), say.outcomes(), say.slowest(slowest), say.skipped(), say.flaky(), say.leaked()]
    parts += [say.unfinished(), say.warnings(warnings), say.again(), [say.last_line()]]
    return "\n\n".join("\n".join(lines) for lines in parts if any(lines)) + "\n"


class _Closing:
    def __init__(self, summary: Summary, style: Styler, repetitions: int, command: str):
        self._summary = summary
        self._style = style
        self._repetitions = repetitions
        self._command = command

    def failures(self) -> list[str]:
        return ["\n\n".join("\n".join(self._failure(one)) for one in self._summary.failures)]

    def _failure(self, one: FinishedTest) -> Iterator[str]:
        yield "=" * WIDTH
        yield self._style(Style.RED, f"{text.word(one)}: {self._name(one)}")
        yield "-" * WIDTH
        yield account(_worst(one))

    def outcomes(self) -> list[str]:
        counts = Counter(one.outcome for one in self._summary.settled)
        words = [self._style(STYLE_OF[one], f"{counts[one]} {one.value}") for one in TestOutcome if counts[one]]
        took = f"in {text.duration(self._summary.seconds)}"
        return ["=" * WIDTH, f"{', '.join(words) or 'no test ran'} {took}"]

    def slowest(self, most: int) -> list[str]:
        ran = [one for one in self._summary.settled if one.outcome is not TestOutcome.SKIPPED]
        chosen = sorted(ran, key=lambda one: -one.seconds)[:most]
        return _table("slowest:", ((text.duration(one.seconds), self._name(one)) for one in chosen))

    def skipped(self) -> list[str]:
        return _table("skipped:", ((str(number), reason) for reason, number in text.skip_reasons(self._summary)))

    def flaky(self) -> list[str]:
        ones = [one for one in self._summary.settled if one.outcome is TestOutcome.FLAKY]
        return _table("flaky:", ((_tries(one), f"{self._name(one)}\n{_first_failure(one)}") for one in ones))

    def leaked(self) -> list[str]:
        ones = [one for one in self._summary.settled if one.outcome is TestOutcome.LEAKED]
        return _table("left processes running, which were ended:", ((_many(one), self._name(one)) for one in ones))

    def unfinished(self) -> list[str]:
        waiting = self._summary.unfinished
        if not waiting:
            return []
        why = "the run was interrupted" if self._summary.interrupted else "the run was stopped before"
        return [f"{text.count(len(waiting), 'test')} did not run to the end: {why}"]

    def warnings(self, late: Sequence[str]) -> list[str]:
        every = dict.fromkeys((*self._summary.warnings, *late))
        return [self._style(Style.YELLOW, f"warning: {text.printable(one)}") for one in every]

    def again(self) -> list[str]:
        names = list(dict.fromkeys(str(one.test.id) for one in self._summary.failures))
        if not names:
            return []
        chosen = names if len(names) <= MOST_NAMES else ["--last-failed"]
        return [f"to run {'it' if len(names) == 1 else 'them'} again:", f"  {self._command} {shlex.join(chosen)}"]

    def last_line(self) -> str:
        """Without colour: it is for machines too."""
        return self._summary.last_line

    def _name(self, one: FinishedTest) -> str:
        return text.name(one.last, self._repetitions)


def _worst(one: FinishedTest) -> Attempt:
    """The attempt that tells why: of a test that passed in the end and counts as failed, an earlier one."""
    good = (TestOutcome.PASSED, TestOutcome.EXPECTED_FAILURE)
    failing = [attempt for attempt in one.attempts if attempt.outcome not in good]
    return failing[-1] if failing else one.last


def _table(heading: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """Aligned at the first column's right edge; a second line of a cell stands under its first."""
    cells = list(rows)
    if not cells:
        return []
    width = max(len(first) for first, _ in cells) + 2
    below = "\n" + " " * (width + 2)
    return [heading, *(f"{first:>{width}}  {second.replace(chr(10), below)}" for first, second in cells)]


def _many(one: FinishedTest) -> str:
    return str(len(one.last.leftovers))


def _tries(one: FinishedTest) -> str:
    return text.count(len(one.attempts), "attempt")


def _first_failure(one: FinishedTest) -> str:
    return f"{one.attempts[0].outcome.value}: {text.title(one.attempts[0].message)}"
