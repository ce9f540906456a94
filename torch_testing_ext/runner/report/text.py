"""Wording that all reports share, and the terminal with its colours, widths and last line."""

from __future__ import annotations

import enum
import os
import re
import sys
import textwrap
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol, TextIO

from torch_testing_ext._collectives.failure import WorldView, describe_world
from torch_testing_ext._process import user_commands
from torch_testing_ext._process.logs import cut, cut_middle, width, without_colours
from torch_testing_ext._process.words import count as count, grouped, list_of, size_in_words
from torch_testing_ext.faults import SweepCell, SweepEnd, SweepReport
from torch_testing_ext.runner.model import (
    COUNTS_AS,
    Attempt,
    Category,
    Event,
    FinishedTest,
    Importing,
    Lease,
    RunBegan,
    RunHeader,
    Summary,
    TestId,
    TestOutcome,
)

# --------------------------------------------------------------------------------------------------------------------
# The terminal of the console report: its stream, the colours on it, and the width of texts, rules and rows.

WIDEST_RULE = 100
# A title gets so many columns even if the name of its test leaves fewer.
SHORTEST_TITLE = 40
# Without a terminal, as in the log of a CI system, lines may be long, but not endless.
LONGEST_TERMINAL_TITLE = 300
# Characters of a message, and of one of its lines, on the console; the files have all of it.
LONGEST_MESSAGE = 30_000
LONGEST_LINE = 2_000


class LineWriter(Protocol):
    """Accepts whole lines of text."""

    def write(self, text: str) -> object: ...


class TerminalStream:
    """A stream that may break (a closed pipe, a full disk), after which the run continues without it.

    It has the methods of a stream, so that other libraries can write to it, too.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream
        self._broken = False

    def write(self, text: str) -> int:
        if not self._broken:
            try:
                self.stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
                self.stream.flush()
            except (OSError, ValueError) as error:
                # ValueError: it is closed.
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Does nothing: all that is written is flushed."""

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:
        return self.stream.encoding or "utf-8"

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        discard(self.stream)
        # The reader closed the pipe on purpose.
        if not isinstance(error, BrokenPipeError):
            # stderr may be broken, too.
            with suppress(OSError, ValueError):
                print(f"{user_commands.runner_name()}: console output stops here: {error}", file=sys.stderr)


def discard(stream: TextIO) -> None:
    """Let a stream that is broken end in /dev/null, with the text in its buffer: Python flushes it at its exit."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class Style(enum.Enum):
    """Text styles, as ANSI codes."""

    GREEN = "32"
    RED = "31;1"
    YELLOW = "33"
    FAINT = "2"
    BOLD = "1"


STYLE_OF_CATEGORY = {Category.PASSED: Style.GREEN, Category.FAILED: Style.RED, Category.SKIPPED: Style.FAINT}
STYLE_OF = {
    **{outcome: STYLE_OF_CATEGORY[category] for outcome, category in COUNTS_AS.items()},
    TestOutcome.LEAKED: Style.YELLOW,
    TestOutcome.FLAKY: Style.YELLOW,
}


class Styler:
    """Applies styles to text, if colours are on."""

    def __init__(self, coloured: bool):
        self._coloured = coloured

    def __call__(self, style: Style, text: str) -> str:
        if not self._coloured:
            return text
        return f"\x1b[{style.value}m{text}\x1b[0m"


def make_styler(stream: TextIO, environ: Mapping[str, str]) -> Styler:
    """Uses colours on terminals and with FORCE_COLOR, but never with NO_COLOR."""
    wanted = bool(environ.get("FORCE_COLOR")) or is_terminal(stream, environ)
    return Styler(wanted and not environ.get("NO_COLOR"))


def columns(stream: TextIO, environ: Mapping[str, str]) -> int | None:
    """The width of the terminal that shows a stream, now; None if there is none. As usual, COLUMNS overrides it."""
    chosen = environ.get("COLUMNS", "")
    if chosen.isascii() and chosen.isdigit() and int(chosen):
        return int(chosen)
    if not is_terminal(stream, environ):
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        # A stream without a descriptor.
        return None


def is_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb"


# -- the layout


@dataclass(frozen=True)
class ConsoleLayout:
    """The space that the report has, where it is shown."""

    # Of the terminal; None if there is none.
    columns: int | None = None
    # The report file that has all of a message, if there is one.
    complete: str = ""
    # The command that shows all of the failure of a test whose name is appended.
    show: str = ""
    # Show all of each failure.
    whole: bool = False

    def rule(self, character: str) -> str:
        """A horizontal line."""
        columns = WIDEST_RULE if self.columns is None else min(WIDEST_RULE, self.columns)
        return character * columns

    def _room(self, taken: int = 0) -> int:
        """The columns for a title, in a line of which some are taken."""
        if self.columns is None:
            return LONGEST_TERMINAL_TITLE
        return max(SHORTEST_TITLE, self.columns - taken)

    def with_title(self, name: str, title: str) -> str:
        """A name and as much of a title as fits, in one line."""
        if not title:
            return name
        return f"{name}: {cut(title, self._room(width(name) + 2))}"

    def wrapped(self, words: str, indent: str, styler: Styler | None = None) -> list[str]:
        """A text broken between words, each line with an indent and in red if there is a styler."""
        columns = self._room()
        wrapped = textwrap.wrap(words, columns, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
        lines = []
        for line in wrapped:
            line = cut(line, columns)
            lines.append(line if styler is None else styler(Style.RED, line))
        return lines

    def rows(self, parts: Sequence[str], separator: str) -> list[list[int]]:
        """Distributes parts over rows that fit: for each row, the numbers of its parts."""
        rows: list[list[int]] = [[]]
        used = 0
        for number, part in enumerate(parts):
            more = width(part)
            if rows[-1]:
                more += len(separator)
            # The separator at the end of a row takes columns, too.
            needed = used + more + len(separator.rstrip())
            if self.columns is not None and rows[-1] and needed > self.columns:
                rows.append([])
                used = 0
                more = width(part)
            rows[-1].append(number)
            used += more
        return rows

    def message(self, words: str) -> str:
        """A message; very long lines and very long messages are cut in the middle, with a pointer to all of it."""
        lines = "\n".join(self._cut(line, LONGEST_LINE, " ") for line in words.split("\n"))
        return self._cut(lines, LONGEST_MESSAGE, "\n")

    def _cut(self, words: str, longest: int, edge: str) -> str:
        if len(words) <= longest:
            return words
        half = longest // 2
        where = f"{self.complete} has all of it" if self.complete else "--html FILE.html keeps all of it"
        note = f"... {len(words) - 2 * half} characters cut here; {where} ..."
        return f"{words[:half]}{edge}{note}{edge}{words[-half:]}"


# --------------------------------------------------------------------------------------------------------------------
# Wording, number formats and elements of XML that all reports share.

# Characters of one log in a file report. TORCH_TESTING_EXT_LOGS keeps complete logs.
LONGEST_LOG = 200_000
# Characters of a title: the first line of a message may be all of it.
LONGEST_TITLE = 500

_LINE_END = re.compile(r"\r\n?")
# Characters that XML 1.0 cannot represent, and control characters.
_CONTROL = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Makes text safe on a terminal and legal in XML: escapes other characters as Python literals do."""
    lines = _LINE_END.sub("\n", without_colours(text))
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), lines)


def log(text: str) -> str:
    """The output of a process, with a limited length."""
    return printable(cut_middle(text, LONGEST_LOG)).rstrip()


def message(attempt: Attempt) -> str:
    """All that is known of an attempt: the files of a run are the only place that has that."""
    return printable(attempt.said).rstrip()


def screen(attempt: Attempt) -> str:
    """The part of a failure that fits on a screen; all of it if only a text is known."""
    return printable(attempt.message if attempt.failure is None else attempt.failure.screen).rstrip()


def account(attempt: Attempt) -> str:
    """All that is known of a failure."""
    return printable(attempt.message if attempt.failure is None else attempt.failure.whole_account).rstrip()


def has_parts(attempt: Attempt) -> bool:
    """Is more known of a failure than a text?"""
    return attempt.failure is not None and attempt.failure.text is None


def logs(attempt: Attempt) -> Iterator[tuple[str, str]]:
    """The output and stacks of all processes of an attempt, each with a heading."""
    if attempt.output:
        yield "the test's process", log(attempt.output)
    for rank_log in attempt.ranks:
        if rank_log.output:
            yield f"rank {rank_log.rank}", log(rank_log.output)
        if rank_log.stacks:
            yield f"rank {rank_log.rank}, stacks", log(rank_log.stacks)


def title(attempt: Attempt) -> str:
    """The first line of what is known of an attempt, with a limited length."""
    return first_line(attempt.title)


def first_line(words: str) -> str:
    """The first line of a text, with a limited length."""
    beginning = words.strip()[: 2 * LONGEST_TITLE]
    line = printable(beginning).strip().partition("\n")[0]
    if len(line) <= LONGEST_TITLE:
        return line
    return f"{line[: LONGEST_TITLE - 3]}..."


def reason(attempt: Attempt) -> str:
    """The title of an attempt, for a line that names the test already."""
    return first_line(attempt.reason) if attempt.reason else title(attempt)


def duration(seconds: float) -> str:
    """A duration with a sensible unit, such as `9.86 s` or `2 min 05 s`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest:02} s"
    return f"{hours} h {minutes:02} min"


def skip_reasons(summary: Summary) -> list[tuple[str, int]]:
    """The reasons of skips and how often each occurs, the most frequent first."""
    reasons: Counter[str] = Counter()
    for result in summary.finished:
        if result.outcome is not TestOutcome.SKIPPED:
            continue
        attempt = result.last
        reason = not_enough_devices(attempt.end.want) if attempt.end.want else title(attempt)
        reasons[reason] += 1
    return reasons.most_common()


# -- drills, and sweeps of tests


class Matrix(NamedTuple):
    """One fault by point and rank: neighbouring points are in one row, and ranks in one column, if alike."""

    head: list[str]
    rows: list[tuple[str, list[tuple[SweepCell, ...]]]]


def sweeps(summary: Summary) -> list[tuple[FinishedTest, SweepReport]]:
    """The tests of a run that have had faults, or were left out by a drill."""
    return [(result, result.last.end.sweep) for result in summary.finished if result.last.end.sweep is not None]


def not_reached(summary: Summary) -> list[str]:
    """The names in the code of tests with faults that no run of any test has reached."""
    reports = [report for _, report in sweeps(summary)]
    reached = {name for report in reports for name in report.reached}
    return sorted({name for report in reports for name in report.names} - reached)


def matrices(report: SweepReport) -> list[Matrix]:
    """A matrix for each fault."""
    of_fault = grouped((cell.word, cell) for cell in report.cells)
    return [_matrix(word, cells) for word, cells in of_fault.items()]


def _matrix(word: str, cells: Sequence[SweepCell]) -> Matrix:
    by_place = {(cell.rank, cell.point): cell for cell in cells}
    points = list(dict.fromkeys(cell.point for cell in sorted(cells, key=lambda cell: cell.rank)))
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted({cell.rank for cell in cells}):
        of_rank = [by_place.get((rank, point)) for point in points]
        alike = tuple("" if cell is None else cell_words((cell,), with_seconds=False) for cell in of_rank)
        columns.setdefault(alike, []).append(rank)
    rows = []

    def key(number: int) -> list[str]:
        return [points[number].partition("(")[0], *(alike[number] for alike in columns)]

    for _, same in groupby(range(len(points)), key):
        of_row = [points[number] for number in same]
        places = [[by_place.get((rank, point)) for rank in ranks for point in of_row] for ranks in columns.values()]
        title = of_row[0] if len(of_row) == 1 else f"{of_row[0]} to {of_row[-1]}"
        rows.append((title, [tuple(cell for cell in of_column if cell is not None) for of_column in places]))
    return Matrix([word, *map(list_of, columns.values())], rows)


def cell_words(cells: Sequence[SweepCell], with_seconds: bool = True) -> str:
    """One cell of faults that did the same; the longest time of them."""
    if not cells:
        return "-"
    first = cells[0]
    known = "" if not first.known else ", known" if first.end is SweepEnd.HUNG else ", known to hang"
    words = first.error if first.end is SweepEnd.ERROR else first.end.value
    times = [cell.seconds for cell in cells if cell.seconds is not None]
    return f"{words}{f' {duration(max(times))}' if times and with_seconds else ''}{known}"


# Of the faults that a list on the console names.
_MOST_TOLD = 10


def drill_lines(report: SweepReport) -> list[tuple[Style | None, str]]:
    """The matrices of a test in a drill as a table, and what hangs it; each line with its style."""
    lines: list[tuple[Style | None, str]] = []
    for matrix in matrices(report) if report.is_drill else ():
        rows = [matrix.head, *([title, *map(cell_words, cells)] for title, cells in matrix.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append((None, f"  {'  '.join(padded)}".rstrip()))
    for heading, told, style in told_of_drill(report):
        named = [*told[:_MOST_TOLD], *([f"and {len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else [])]
        lines += [(style, f"  {heading}: {line}") for line in named]
    return lines


def told_of_drill(report: SweepReport) -> list[tuple[str, list[str], Style]]:
    """The lines of a drill besides its matrices: hangs, known ones, and known ones that are no more."""
    if not report.is_drill:
        return []
    known, unknown = hangs(report, known=True), hangs(report, known=False)
    gone = ("hangs no more", hang_no_more(report), Style.YELLOW)
    return [("hangs", unknown, Style.RED), ("known to hang", known, Style.FAINT), gone]


def hangs(report: SweepReport, known: bool) -> list[str]:
    """The faults that hang a test, and why; those that are known to, with their reasons."""
    hung = [cell for cell in report.cells if cell.end is SweepEnd.HUNG and bool(cell.known) is known]
    return [f"{cell.fault} {cell.place}: {cell.known or printable(cell.title)}" for cell in hung]


def hang_no_more(report: SweepReport) -> list[str]:
    """The faults that are known to hang a test, and do not."""
    others = [cell for cell in report.cells if cell.end is not SweepEnd.HUNG and cell.known]
    return [*(f"{cell.fault}: {cell.end.value}; known to hang: {cell.known}" for cell in others), *report.missing]


def not_enough_devices(want: str) -> str:
    """The reason of a skip. `want` is the number of devices that the test needs, such as "4 devices"."""
    return f"not enough devices: needs {want}"


def place(lease: Lease) -> str:
    """The devices of a unit or, if it has none, its CPU slots, in words."""
    if lease.devices:
        words = f"gpu {', '.join(lease.devices)}"
    elif lease.slots:
        words = f"cpu {', '.join(map(str, lease.slots))}"
    else:
        return ""
    if lease.node:
        words += f" on {lease.node}"
    if lease.devices and lease.shared_by:
        words += f": {lease.shared_by} ranks on {count(len(lease.devices), 'GPU')} over {lease.over}"
    return words


def node_of(lease: Lease) -> str:
    """The node of a cluster that a unit ran on, as `node a`; empty on this machine."""
    return f"node {printable(lease.node)}" if lease.node else ""


def leftovers(attempt: Attempt) -> list[str]:
    """A line on the processes that a test has left running; none if its message names them, or if there are none."""
    if attempt.outcome is TestOutcome.LEAKED:
        return []
    names = "; ".join(printable(process) for process in attempt.end.leftovers)
    return [f"left running (now terminated): {names}"] if names else []


def resources(run: RunBegan) -> list[str]:
    """The devices and slots of a run, such as `4 devices` and `8 CPU slots`."""
    slots = count(run.slots, "CPU slot")
    if not run.devices:
        return [slots]
    device = "fake device" if run.fake else "device"
    return [count(len(run.devices), device), slots]


def memory(attempt: Attempt) -> str:
    """The most device memory that a test has had, such as `1.2 GiB of device memory`; empty if it has used none."""
    if attempt.end.memory is None:
        return ""
    return f"{size_in_words(attempt.end.memory.reserved)} of device memory"


def name(attempt: Attempt, repetitions: int = 1) -> str:
    """The full name of a test, with the number of the repetition if it is repeated."""
    return test_name(attempt.test.id) + repetition(attempt, repetitions)


def one_line(name: str) -> str:
    return printable(name).replace("\n", "\\n")


def test_name(test: TestId) -> str:
    """The full name of a test on one line."""
    return one_line(str(test))


test_name.__test__ = False  # type: ignore[attr-defined]  # its name looks like a test to pytest


def repetition(attempt: Attempt, repetitions: int) -> str:
    """` [2]` for the second repetition of a repeated test, otherwise empty."""
    repeated = repetitions > 1 or attempt.repetition > 0
    return f" [{attempt.repetition + 1}]" if repeated else ""


def why_unfinished(summary: Summary) -> str:
    if summary.error:
        return "an internal error ended the run"
    return "the run was interrupted" if summary.interrupted else "the run stopped early"


def outcome_in_words(finished: FinishedTest) -> str:
    """The outcome of a test, with the number of attempts if there are several."""
    attempts = len(finished.attempts)
    outcome = str(finished.outcome.value)
    if attempts > 1 and finished.last.outcome is TestOutcome.SKIPPED:
        return f"{outcome}, then skipped when retried"
    if finished.outcome is TestOutcome.FLAKY:
        return f"flaky: passed on the {ordinal(attempts)} attempt"
    if attempts > 1:
        return f"{outcome} {attempts} times"
    return outcome


def ordinal(number: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    is_teen = number % 100 in (11, 12, 13)
    ending = "th" if is_teen else endings.get(number % 10, "th")
    return f"{number}{ending}"


def header_facts(header: RunHeader) -> list[tuple[str, str]]:
    """The known facts about where a run took place, and with which software, each with its name."""
    commit = header.commit
    if commit and header.uncommitted_changes:
        commit += " (with uncommitted changes)"
    facts = [
        ("command", header.command),
        ("commit", commit),
        ("host", header.host),
        ("torch", header.torch),
        ("Python", header.python),
        ("devices", header.devices),
        ("world", "" if header.world is None else describe_world(header.world)),
    ]
    return [(name, value) for name, value in facts if value]


def world_in_words(view: WorldView) -> str:
    """The whole world that a test has run in: its size, what is alike, and how much was sent."""
    calls = sum(len(alike.ranks) * alike.count for alike in view.classes)
    classes = f"{len(view.classes)} {'class' if len(view.classes) == 1 else 'classes'}"
    sent = size_in_words(sum(map(sum, view.traffic)))
    words = f"whole world of {count(view.size, 'rank')} in {classes}: {count(calls, 'call')}, {sent} sent"
    return f"{words}, longest chain {view.longest_chain}"


# -- elements of XML and HTML


def xml_element(tag: str, *children: ET.Element | str | None, **attributes: object) -> ET.Element:
    """Creates an element whose text is printable. Example: xml_element("p", "1 < 2", class_="x").

    Omits attributes that are None; `class_` stands for class, and `data_x` for data-x.
    """
    element = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), printable(str(value)))
    for child in children:
        if child is not None:
            _append(element, child)
    return element


def _append(element: ET.Element, child: ET.Element | str) -> None:
    if not isinstance(child, str):
        element.append(child)
        return
    added = printable(child)
    if len(element):
        last = element[-1]
        last.tail = (last.tail or "") + added
    else:
        element.text = (element.text or "") + added


# --------------------------------------------------------------------------------------------------------------------
# The files that are being imported, in words; on a terminal where rich is not installed, one line says so.


def importing(event: Importing) -> str:
    """The files that are being imported, in words."""
    if not event.files:
        return f"importing torch, then {count(event.total, 'file')}"
    names = ", ".join(printable(name.rpartition("/")[2]) for name in event.files)
    return f"importing {event.total - event.left + 1}/{event.total}: {names}"


@dataclass
class ImportNote:
    """Says once that files are imported, on a terminal without a live display. It is also a writer."""

    terminal: LineWriter
    _has_begun: bool = False

    def write(self, lines: str) -> None:
        self.terminal.write(lines)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Importing) and not self._has_begun:
            self._has_begun = True
            self.terminal.write(f"{importing(event)}\n")
