"""A failure on one screen: what happened, the culprit first; the ranks, grouped by what they did; and the lines. Pure.

Nothing but the source is read. The account of the failure has the rest: all tracebacks, stacks and outputs.
"""

from __future__ import annotations

import enum
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch_testing_ext._collectives.findings import Doing, Finding, FindingKind
from torch_testing_ext._collectives.records import RankRecord, Site
from torch_testing_ext._process.logs import cut, text_of, width, without_colours
from torch_testing_ext._process.reaping import describe_exit
from torch_testing_ext._process.whole_files import is_library
from torch_testing_ext._process.words import list_of

from . import folding, hang
from .account_writer import account_of
from .accounts import RankEnding
from .causes import Cause
from .exits import probable_lines_of_exit
from .rank_report import RankReport, told_by, without_cpp_place
from .verdict import Case, is_victim

WIDTH = 80
# The lines of a failure at that width. The two that a runner adds, with the name of the test, make 15.
MOST_LINES = 13
_MOST_GROUPS = 4
# Lines before those at fault, their number, lines with values, and lines that the culprit has printed: from all that
# there is to the least that helps.
_LEVELS = ((2, 2, 5, 3), (1, 2, 5, 3), (1, 2, 5, 1), (0, 2, 4, 1), (0, 1, 3, 1), (0, 1, 1, 0), (0, 0, 0, 0))
_LONGEST_TITLE = 3 * WIDTH
_LONGEST_DOING = 46
_WIDEST_RANKS = 20


class Row(NamedTuple):
    """A line of the table: ranks, with what they did, and where."""

    ranks: tuple[int, ...]
    did: str
    site: Site | None


@dataclass(frozen=True)
class Fault:
    """A failure that is judged. `culprits`: the ranks that are at fault, the first one first."""

    title: str
    reports: Sequence[RankReport]
    case: Case
    culprits: tuple[int, ...] = ()
    finding: Finding | None = None
    is_alone: bool = False  # a test without ranks

    @property
    def first(self) -> RankReport | None:
        """The first report of a culprit."""
        return next((r for r in self.reports if r.rank in self.culprits), None)


def height(text: str, columns: int = WIDTH) -> int:
    """The number of lines that a text takes on a terminal."""
    return sum(_lines_of(line, columns) for line in text.splitlines())


def _lines_of(line: str, columns: int) -> int:
    if line.isascii() and len(line) > columns:
        return len(textwrap.wrap(line, columns))
    return max(1, -(-width(line) // columns))


def show_error(error: BaseException, case: Case, within: str = "") -> str:
    """The text for an exception of a test without ranks. `within` begins the title."""
    account = account_of(error, isinstance(error, AssertionError), 0.0)
    report = RankReport(0, account.ending, **told_by(account))
    return show(Fault(f"{within}{account.summary}", [report], case, (0,), is_alone=True))


def show(fault: Fault) -> str:
    """The text. The first line is the title, whole: the console breaks it."""
    rows = _rows(fault)
    first = fault.first
    values = list(_values(first, fault.reports)) if first is not None else []
    printed = list(_printed(first))[-_LEVELS[0][-1] :] if first is not None else []
    sites = list(dict.fromkeys(row.site for row in rows if row.site is not None))[:2]
    if first is not None and len(sites) == 1:
        in_test = next((site for site in reversed(_sites(first)) if site.file == fault.case.file), sites[0])
        sites += [in_test] if in_test != sites[0] else []
    table = [f"  {site}" for site in sites[:1]] if fault.is_alone else _table(rows)
    commands = (("all of it", fault.case.show_command), ("run again", fault.case.rerun_command))
    end = [*_remarks(fault), *(f"{what}:  {command}" for what, command in commands if command)]
    title = cut(without_colours(fault.title), _LONGEST_TITLE)
    for context, most_sites, most_values, most_printed in _LEVELS:
        middle = [
            *excerpts(sites[:most_sites], context),
            *values[:most_values],
            *printed[max(0, len(printed) - most_printed) :],
        ]
        lines = [title, *table, *([""] if middle else []), *middle, *([""] if end else []), *end]
        if height("\n".join(lines)) <= MOST_LINES:
            break
    return "\n".join(lines)


# -- the parts of a text, for reports


class CodeLine(NamedTuple):
    """A line of the source, with its number."""

    number: int
    is_marked: bool
    text: str


class ScreenParts(NamedTuple):
    """A text that `show` has made. A row has the ranks, what they did, and where; that of a test without ranks, where.

    `values`: what the assertion says, what was printed, and remarks.
    """

    title: str
    rows: list[tuple[str, str, str]]
    code: list[CodeLine]
    values: list[str]


_ROW = re.compile(r"  (ranks? \d[\d, -]*|\d+ ranks)  +(\S.*?)(?:  +(\S+:\d+(?: in .*)?))?")
_ALONE = re.compile(r"  (\S+:\d+ in .*)")
_CODE = re.compile(r"  ([> ]) +(\d+) \|(?: (.*))?")


def read_screen(text: str) -> ScreenParts:
    title, *lines = text.split("\n")
    found = ScreenParts(title, [], [], [])
    for line in lines:
        if not found.code and (row := _ROW.fullmatch(line)):
            found.rows.append((row[1].strip(), row[2], row[3] or ""))
        elif not found.rows and (alone := _ALONE.fullmatch(line)):
            found.rows.append(("", "", alone[1]))
        elif not found.values and (code := _CODE.fullmatch(line)):
            found.code.append(CodeLine(int(code[2]), code[1] == ">", code[3] or ""))
        elif line and kind_of(line) is not LineKind.COMMAND:
            found.values.append(line.removeprefix("  "))
    return found


class LineKind(enum.Enum):
    """The kind of a line, for its colour."""

    FAULT = "fault"  # a line of the source that is at fault
    GOT = "got"
    EXPECTED = "expected"
    COMMAND = "command"
    OTHER = "other"


_KINDS = (
    (re.compile(r"  > +\d+ \| "), LineKind.FAULT),
    (re.compile(r" *(Got: |- |Expected .* but got )"), LineKind.GOT),
    (re.compile(r" *(Expected: |\+ )"), LineKind.EXPECTED),
    (re.compile(r"(all of it|run again):  "), LineKind.COMMAND),
)


def kind_of(line: str) -> LineKind:
    """The kind of a line below the title."""
    return next((kind for pattern, kind in _KINDS if pattern.match(line)), LineKind.OTHER)


# -- the rows


def _rows(fault: Fault) -> list[Row]:
    doing = {one.rank: one for one in (fault.finding.lines if fault.finding else ()) if isinstance(one, Doing)}
    found: dict[object, list[tuple[RankReport, str, Site | None]]] = {}
    victims = [
        r for r in fault.reports if r.rank not in fault.culprits and r.rank not in doing and _is_victim(r, fault)
    ]
    # One that tells what failed in all ranks comes first, since it knows the line.
    for report in sorted((r for r in fault.reports if r not in victims), key=lambda r: r.rank not in fault.culprits):
        did, site = _did(report, doing, fault)
        place = None if report.cause is Cause.OF_ALL else site
        found.setdefault((_kind_of(report, did), place), []).append((report, did, site))
    rows = [Row(tuple(sorted(r.rank for r, _, _ in each)), each[0][1], each[0][2]) for each in found.values()]
    if victims:
        lost = "lost its peer" if len(victims) == 1 else "lost their peer"
        were_ended = any(r.ending is RankEnding.STOPPED for r in victims)
        rows.append(Row(tuple(r.rank for r in victims), f"{lost}, or ended for that" if were_ended else lost, None))
    return sorted(rows, key=lambda row: (not set(row.ranks) & set(fault.culprits), row.ranks))


def _is_victim(report: RankReport, fault: Fault) -> bool:
    """Did this rank only lose its peer, or was it ended for the failure of another?"""
    first = fault.first
    has_failed = first is not None and first.ending.is_failure and first.ending is not RankEnding.STOPPED
    return is_victim(report) or (has_failed and report.ending is RankEnding.STOPPED)


def _kind_of(report: RankReport, did: str) -> object:
    """A key for what a rank did: of ranks that failed, the type of the exception and not its text."""
    if report.cause is Cause.OF_ALL:
        return report.cause
    if report.ending in (RankEnding.FAILED, RankEnding.ERROR) and report.sites:
        return report.ending, report.summary.partition(":")[0]
    return folding.without_accidents(did)


def _did(report: RankReport, doing: dict[int, Doing], fault: Fault) -> tuple[str, Site | None]:
    if (own := doing.get(report.rank)) is not None and report.in_flight is None:
        return own.did, own.site
    site = site_of(report, fault.case.file)
    match report.ending:
        case RankEnding.PASSED:
            if not (lines := _left_at(report, doing, fault)):
                return "passed", None
            where = "" if len(lines) == 1 else f" at line {' or '.join(map(str, lines))}"
            return f"passed, probably left{where}", Site(fault.case.file, lines[0], fault.case.function)
        case RankEnding.SKIPPED:
            return f"skipped: {report.summary}", None
        case RankEnding.FAILED | RankEnding.ERROR:
            is_told = report.summary in fault.title or report.cause is Cause.OF_ALL
            verb = "failed" if report.ending is RankEnding.FAILED else "raised"
            return verb if is_told else without_colours(without_cpp_place(report.summary)), site
        case RankEnding.STOPPED:
            return _still_running(report.recorder, site), site
        case RankEnding.LOST:
            return "was lost", None
        case _:
            return describe_exit(report.code), site


def _still_running(record: RankRecord | None, site: Site | None) -> str:
    if record is None:
        return "still running"
    if (latest := record.latest) is None:
        return "runs, before any collective"
    is_in = site is not None and latest.site is not None and latest.site[:2] == site[:2]
    return f"{'in' if is_in else 'after'} {hang.shown(record, latest)}"


def _left_at(report: RankReport, doing: dict[int, Doing], fault: Fault) -> list[int]:
    """The lines where a rank that passed has probably left, before the collective that others are in."""
    kinds = (FindingKind.LEFT_ALONE, FindingKind.BEHIND)
    missed = next((one.site for one in doing.values() if one.site is not None), None)
    if report.rank not in fault.culprits or fault.finding is None or fault.finding.kind not in kinds:
        return []
    if missed is None or missed.file != fault.case.file:
        return []
    record = report.recorder or report.issued
    latest = record.latest.site if record is not None and record.latest is not None else None
    last = latest.line if latest is not None and latest.file == missed.file else None
    return probable_lines_of_exit(missed.file, fault.case.function, last, missed.line)


def _table(rows: Sequence[Row]) -> list[str]:
    shown = list(rows[: _MOST_GROUPS if len(rows) <= _MOST_GROUPS else _MOST_GROUPS - 1])
    cells = [(_names(row.ranks), cut(row.did, _LONGEST_DOING), row.site) for row in shown]
    if rest := rows[len(shown) :]:
        ranks = [rank for row in rest for rank in row.ranks]
        cells.append((_names(ranks), f"{len(rest)} other ways to end", None))
    widths = [max(len(names) for names, _, _ in cells), max(len(did) for _, did, _ in cells)]
    found = []
    for names, did, site in cells:
        start = f"  {names:<{widths[0]}}  {did:<{widths[1]}}  "
        place = str(site or "")
        # The number of the line says more than the function.
        place = place if len(start) + len(place) <= WIDTH else place.partition(" in ")[0]
        found.append(cut(f"{start}{place}".rstrip(), WIDTH))
    return found


def _names(ranks: Sequence[int]) -> str:
    names = list_of(ranks)
    return names if len(names) <= _WIDEST_RANKS else f"{len(ranks)} ranks"


# -- sites and their source

_FRAME_OF_TRACEBACK = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


def site_of(report: RankReport, file: str) -> Site | None:
    """Find the line where a rank ended or is: the innermost one outside libraries."""
    if report.stacks and not report.sites:
        return hang.place(report.stacks, file)
    sites = _sites(report)
    own = [site for site in sites if not is_library(site.file)]
    return next(iter(own[::-1] or sites[::-1]), None)


def _sites(report: RankReport) -> list[Site]:
    if report.sites:
        return list(report.sites)
    found = _FRAME_OF_TRACEBACK.finditer(report.traceback)
    return [Site(one["file"], int(one["line"]), one["function"]) for one in found]


def excerpts(sites: Iterable[Site], context: int) -> list[str]:
    """The lines of the source, each marked, with `context` lines before it."""
    found: list[str] = []
    wanted: dict[str, dict[int, bool]] = {}
    for site in sites:
        lines = wanted.setdefault(site.file, {})
        for number in range(max(1, site.line - context), site.line + 1):
            lines[number] = lines.get(number, False) or number == site.line
    for file, numbers in wanted.items():
        source = text_of(Path(file)).splitlines()
        known = {number: source[number - 1] for number in sorted(numbers) if 0 < number <= len(source)}
        if not any(line.strip() for line in known.values()):
            continue
        common = min(len(line) - len(line.lstrip()) for line in known.values() if line.strip())
        for number, line in known.items():
            mark = ">" if numbers[number] else " "
            found.append(cut(f"  {mark} {number:>5} | {line[common:]}".rstrip(), WIDTH))
    return found


# -- the values of an assertion, and the end


def _values(first: RankReport, reports: Sequence[RankReport]) -> Iterator[str]:
    """The further lines of the culprit's message, without those that say nothing."""
    if is_victim(first) or first.cause is Cause.OF_ALL:
        return
    lines = [line.rstrip() for line in without_colours(first.details).strip().splitlines()[1:] if line.strip()]
    # The sort is stable: the two values first, then where they were and what came before, then how much they differ.
    others = [f"(of rank {first.rank}; other ranks have other values)"] if _differ(first, reports) else []
    order = (("Expected", "Got"), ("(of rank", "The failure occurred for", "after "))
    for line in sorted([*others, *lines], key=lambda line: [not line.startswith(start) for start in order]):
        if not line.endswith("Use -v to get more diff"):  # pytest's; all of it has more
            yield cut(f"  {line}", WIDTH)


def _printed(first: RankReport) -> Iterator[str]:
    lines = (line.strip() for line in without_colours(folding.warnings_once(first.output, times=0)).splitlines())
    return (cut(f"  printed: {line}", WIDTH) for line in lines if line)


def _differ(first: RankReport, reports: Sequence[RankReport]) -> bool:
    alike = [r for r in reports if r.sites and r.sites[-1] == (first.sites or (None,))[-1]]
    return len({folding.without_own_number(r.details, r.rank) for r in alike}) > 1


def _remarks(fault: Fault) -> Iterator[str]:
    sentences = [one.sentence for r in fault.reports for one in r.found if one.sentence not in fault.title]
    if fault.finding is not None and fault.finding.title not in fault.title and not _follows(fault):
        sentences.insert(0, fault.finding.title)
    if sentences:
        more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
        yield cut(f"also: {sentences[0]}{more}", WIDTH)
    left = [(r.rank, one) for r in fault.reports for one in r.leftovers]
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        yield cut(f"rank {left[0][0]} left running (now terminated): {left[0][1]}{more}", WIDTH)
    if fault.case.note:
        yield from fault.case.note.splitlines()[:2]


def _follows(fault: Fault) -> bool:
    """Does what was found only say that the others wait for the culprits?"""
    found = fault.finding
    return found is not None and found.kind is FindingKind.LEFT_ALONE and set(found.ranks) <= set(fault.culprits)
