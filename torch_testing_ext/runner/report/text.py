"""Words and numbers as all reports have them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch_testing_ext._process.logs import cut_middle

from ..model import Attempt, FinishedTest, Lease, Summary, TestOutcome

# Of one log, in a report that is a file. Whoever needs more keeps the logs.
LONGEST_LOG = 200_000

# Sequences that colour text or move the cursor: not part of what was said.
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_LINE_END = re.compile(r"\r\n?")
# What XML 1.0 has no way to write, and what a terminal would obey.
_CONTROL = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Text that is safe on a terminal and legal in XML: other characters as Python's literals write them."""
    lines = _LINE_END.sub("\n", _TERMINAL.sub("", text))
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), lines)


def log(text: str) -> str:
    """What a process wrote, of bearable length."""
    return printable(cut_middle(text, LONGEST_LOG)).rstrip()


def logs(attempt: Attempt) -> Iterator[tuple[str, str]]:
    """All that an attempt's processes wrote, with headings."""
    if attempt.output:
        yield "the test's own process", log(attempt.output)
    for one in attempt.ranks:
        if one.output:
            yield f"rank {one.rank}", log(one.output)
        if one.stacks:
            yield f"rank {one.rank}, where it was", log(one.stacks)


def title(message: str) -> str:
    """A message's first line."""
    return printable(message.strip().partition("\n")[0])


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def skip_reasons(summary: Summary) -> list[tuple[str, int]]:
    """What was skipped, and for want of what, the most frequent first."""
    skips = [one.last for one in summary.settled if one.outcome is TestOutcome.SKIPPED]
    return Counter(f"for want of {one.want}" if one.want else title(one.message) for one in skips).most_common()


def place(lease: Lease) -> str:
    """Where a unit runs: its devices, or where it has none its CPU slots."""
    if lease.devices:
        return f"gpu {', '.join(lease.devices)}"
    return f"cpu {', '.join(map(str, lease.slots))}" if lease.slots else ""


def name(attempt: Attempt, repetitions: int = 1) -> str:
    """A test's full name; of a test that is repeated, with the number of the repetition."""
    return printable(str(attempt.test.id)) + repetition(attempt, repetitions)


def repetition(attempt: Attempt, repetitions: int) -> str:
    repeated = repetitions > 1 or attempt.repetition > 0
    return f" [{attempt.repetition + 1}]" if repeated else ""


def word(settled: FinishedTest) -> str:
    """A settled test's outcome in words."""
    tries = len(settled.attempts)
    if settled.outcome is TestOutcome.FLAKY:
        return f"flaky: passed when tried the {ordinal(tries)} time"
    return f"{settled.outcome.value} {tries} times" if tries > 1 else settled.outcome.value


def ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
