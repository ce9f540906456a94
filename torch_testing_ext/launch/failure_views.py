"""The view of a failure: what happened, the culprit first; the ranks, grouped by what they did; and the lines. Pure.

Nothing but the source is read. The account of the failure has the rest: all tracebacks, stacks and outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_testing_ext._collectives.failure import (
    MOST_CONTEXT,
    MOST_PRINTED,
    MOST_SITES,
    WIDTH,
    FailureView,
    LineKind,
    RankRow,
    RankWait,
    SourceLine,
    Value,
)
from torch_testing_ext._collectives.findings.abandoned_calls import latest_call_in_words
from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._collectives.records.issued_calls import INIT, RankRecord
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.ends import describe_exit
from torch_testing_ext._process.logs import cut, without_colours
from torch_testing_ext._process.same_texts import warnings_once, without_accidents, without_own_number
from torch_testing_ext._process.words import MOST_LINES, group_by, grouped
from torch_testing_ext._tests.source_files import is_library, source_text
from torch_testing_ext._torch.signs.error_texts import without_cpp_place
from torch_testing_ext.launch import hang, nccl_status
from torch_testing_ext.launch.account_writer import account_of
from torch_testing_ext.launch.accounts import RankEnding
from torch_testing_ext.launch.causes import Cause
from torch_testing_ext.launch.probable_exits import calls_that_exit, probable_lines_of_exit
from torch_testing_ext.launch.rank_reports import RankReport, ended, is_victim, report_of
from torch_testing_ext.launch.verdict import Case

_LONGEST_EXAMPLE = 3 * WIDTH


@dataclass(frozen=True)
class Fault:
    """A failure that is judged. `culprits`: the ranks that are at fault, the first one first."""

    title: str
    reports: Sequence[RankReport]
    case: Case
    culprits: tuple[int, ...] = ()
    finding: Finding | None = None
    # The title tells the finding.
    tells_finding: bool = False
    # The title tells this line about an exception.
    told_summary: str = ""
    # A test without ranks.
    is_alone: bool = False

    @property
    def first(self) -> RankReport | None:
        """The first report of a culprit."""
        return next((r for r in self.reports if r.rank in self.culprits), None)


def view_of_error(error: BaseException, case: Case, within: str = "", traceback: str = "") -> FailureView:
    """The view of an exception of a test without ranks. `within` begins the title and `traceback` ends the account."""
    account = account_of(error, isinstance(error, AssertionError), 0.0)
    report = report_of(0, account)
    title = f"{within}{account.summary}"
    fault = Fault(title, [report], case, (0,), told_summary=account.summary, is_alone=True)
    return view_of(fault, f"{title}\n\n{traceback}")


def view_of(fault: Fault, account: str, explained: Finding | None = None) -> FailureView:
    """The view of a failure. `explained`: the finding that its account shows."""
    rows = _rows(fault)
    first = fault.first
    sites = list(dict.fromkeys(row.site for row in rows if row.site is not None))[:MOST_SITES]
    if first is not None and len(sites) == 1:
        in_test = next((site for site in reversed(_sites(first)) if site.file == fault.case.file), sites[0])
        sites += [in_test] if in_test != sites[0] else []
    return FailureView(
        fault.title,
        rows=tuple(RankRow((), "", site) for site in sites[:1]) if fault.is_alone else tuple(rows),
        sites=tuple(sites),
        source=tuple(_source(sites)),
        values=tuple(_values(first, fault.reports)) if first is not None else (),
        printed=tuple(_printed(first))[-MOST_PRINTED:] if first is not None else (),
        remarks=tuple(_remarks(fault)),
        waits=tuple(_waits(explained)) if explained is not None else (),
        show_command=fault.case.show_command,
        rerun_command=fault.case.rerun_command,
        account=account,
    )


def _source(sites: Iterable[Site]) -> Iterator[SourceLine]:
    """The lines of the source at these sites, with those before them."""
    numbers = grouped(
        (site.file, number) for site in sites for number in range(max(1, site.line - MOST_CONTEXT), site.line + 1)
    )
    for file, wanted in numbers.items():
        lines = source_text(file).splitlines()
        yield from (SourceLine(file, number, lines[number - 1]) for number in sorted({*wanted}) if number <= len(lines))


def _waits(finding: Finding) -> Iterator[RankWait]:
    """The waits of a finding; of many ranks, those that do the same share one."""
    waiting = [line for line in finding.lines if isinstance(line, Doing) and line.awaited]
    are_many = len(finding.lines) > MOST_LINES
    alike = grouped((line[1:] if are_many else line, line) for line in waiting)
    for lines in list(alike.values())[: MOST_LINES + 1]:
        first = lines[0]
        yield RankWait(tuple(line.rank for line in lines), first.awaited, first.call or first.did, first.site)


# -- the rows


class _Seen(NamedTuple):
    """The doing of one rank, and its place. Ranks whose `kind` and `place` are equal did the same."""

    rank: int
    did: str
    site: Site | None
    kind: object
    place: Site | None
    brief: str = ""


def _rows(fault: Fault) -> list[RankRow]:
    lines = fault.finding.lines if fault.finding is not None else ()
    doing = {line.rank: line for line in lines if isinstance(line, Doing)}
    culprits = set(fault.culprits)
    victims = {r.rank for r in fault.reports if r.rank not in doing and _is_victim(r, fault)} - culprits
    known = {r.rank: call for r in fault.reports if r.rank in victims and (call := _call_of_victim(r)) is not None}
    victims -= known.keys()
    others = (r for r in fault.reports if r.rank not in victims and r.rank not in known)
    # One that tells what failed in all ranks comes first, since it knows the line.
    seen = [_seen(report, doing, fault) for report in sorted(others, key=lambda r: r.rank not in culprits)]
    seen += known.values()
    alike = group_by(seen, lambda one: (one.kind, one.place))
    rows = [
        RankRow(tuple(sorted(seen.rank for seen in same)), same[0].did, same[0].site, same[0].brief) for same in alike
    ]
    if victims:
        lost = "lost its peer" if len(victims) == 1 else "lost their peer"
        were_ended = any(r.rank in victims and r.ending is RankEnding.STOPPED for r in fault.reports)
        in_order = tuple(r.rank for r in fault.reports if r.rank in victims)
        rows.append(RankRow(in_order, f"{lost}, or stopped for that" if were_ended else lost, None))
    return sorted(rows, key=lambda row: (not set(row.ranks) & culprits, row.ranks))


def _call_of_victim(report: RankReport) -> _Seen | None:
    """The call in which a rank lost its peer, or was stopped for that, and its line; None if they are not known."""
    record = report.issued or report.recorder
    latest = latest_call_in_words(record) if record is not None and record.is_whole else None
    if latest is None or latest.call.site is None:
        return None
    has_lost = report.ending is not RankEnding.STOPPED
    did = f"lost a peer in {latest.words}" if has_lost else f"in {latest.words}, then stopped"
    return _Seen(report.rank, did, latest.call.site, did, latest.call.site, f"in {latest.words}")


def _seen(report: RankReport, doing: Mapping[int, Doing], fault: Fault) -> _Seen:
    call = doing.get(report.rank)
    if call is not None and report.in_flight is None:
        # However the ranks have ended: those that called the same share a row, and no others.
        # A call of a thread may have no line of the program.
        site = call.site or site_of(report, fault.case.file)
        return _Seen(report.rank, call.did, site, call.did, site, call.brief)
    did, site = _did(report, doing, fault)
    return _Seen(report.rank, did, site, _kind_of(report, did), None if report.error.cause is Cause.OF_ALL else site)


def _is_victim(report: RankReport, fault: Fault) -> bool:
    """Whether this rank only lost its peer, or was stopped for the failure of another."""
    first = fault.first
    has_failed = first is not None and first.ending.is_failure and first.ending is not RankEnding.STOPPED
    return is_victim(report) or (has_failed and report.ending is RankEnding.STOPPED)


def _kind_of(report: RankReport, did: str) -> object:
    """A key for what a rank did: of ranks that failed, the type of the exception and not its text."""
    if report.error.cause is Cause.OF_ALL:
        return report.error.cause
    if report.ending in (RankEnding.FAILED, RankEnding.ERROR) and report.error.sites:
        return report.ending, report.error.type_name
    return without_accidents(did)


def _did(report: RankReport, doing: Mapping[int, Doing], fault: Fault) -> tuple[str, Site | None]:
    """The end of a rank of which the finding says nothing, or the line where it still is."""
    site = site_of(report, fault.case.file)
    match report.ending:
        case RankEnding.PASSED:
            missed, lines = _left_at(report, doing, fault)
            if missed is None or not lines:
                return "passed", None
            where = "" if len(lines) == 1 else f" at line {' or '.join(map(str, lines))}"
            return f"passed, probably left{where}", missed._replace(line=lines[0])
        case RankEnding.SKIPPED:
            return f"skipped: {report.summary}", None
        case RankEnding.FAILED | RankEnding.ERROR:
            if report.error.example and report.rank not in fault.culprits:
                return "lost its peer in an example", site
            is_told = report.summary in ("", fault.told_summary) or report.error.cause is Cause.OF_ALL
            verb = "failed" if report.ending is RankEnding.FAILED else "raised"
            return verb if is_told else without_colours(without_cpp_place(report.summary)), site
        case RankEnding.STOPPED:
            trouble = report.nccl.trouble if report.nccl is not None else ""
            did, site = _still_running(report.recorder, site, fault.case.file)
            return "; ".join(filter(None, (did, trouble))), site
        case RankEnding.LOST:
            return "was lost", None
        case RankEnding.UNSTARTED:
            return report.ending.value, None
        case RankEnding.FAULT:
            return ended(report), None
        case RankEnding.EXITED if site is None:
            # An exit leaves no trace of where.
            calls = calls_that_exit(fault.case.file, fault.case.function)
            at = "here" if len(calls) == 1 else f"at line {' or '.join(map(str, calls))}"
            probably = [f"probably {at}"] if calls else []
            first = next((Site(fault.case.file, *call) for call in calls.items()), None)
            return ", ".join([describe_exit(report.code), *probably]), first
        case _:
            return describe_exit(report.code, as_participle=True), site


def _still_running(record: RankRecord | None, site: Site | None, file: str) -> tuple[str, Site | None]:
    """The doing of a rank that was stopped, and its line, or that of its latest call if its test was over.

    `site`: the line that it was at. `file`: the test's.
    """
    if record is None:
        return "still running", site
    if record.creating is not None and record.creating.is_default:
        return f"in {INIT}", site
    if (latest := record.latest) is None:
        return "runs, before any collective", site
    call = hang.call_in_words(record, latest)
    is_over = site is not None and site.file != file and is_library(site.file)
    if is_over and latest.site is not None:
        # Its exception was being told when it was stopped: the line that does that belongs to nobody.
        return f"in {call}, then stopped" if record.has_raised else f"after {call}", latest.site
    is_in = site is not None and latest.site is not None and latest.site[:2] == site[:2]
    return f"{'in' if is_in else 'after'} {call}", site


def _left_at(report: RankReport, doing: Mapping[int, Doing], fault: Fault) -> tuple[Site | None, list[int]]:
    """The call that others are in, and the lines of its function where a rank that passed has probably left before."""
    kinds = (FindingKind.ABANDONED, FindingKind.BEHIND)
    missed = next((doing_of_rank.site for doing_of_rank in doing.values() if doing_of_rank.site is not None), None)
    if report.rank not in fault.culprits or fault.finding is None or fault.finding.kind not in kinds:
        return None, []
    if missed is None or is_library(missed.file):
        return None, []
    record = report.recorder or report.issued
    latest = record.latest.site if record is not None and record.latest is not None else None
    last = latest.line if latest is not None and latest.file == missed.file else None
    return missed, probable_lines_of_exit(missed.file, missed.function, last, missed.line)


# -- sites and their source

_FRAME_OF_TRACEBACK = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


def site_of(report: RankReport, file: str) -> Site | None:
    """Find the line where a rank ended or is: the innermost one outside libraries."""
    if report.stacks and not report.error.sites:
        return hang.site_of_rank(report.stacks, file)
    sites = _sites(report)
    own = [site for site in sites if not is_library(site.file)]
    return next(iter(own[::-1] or sites[::-1]), None)


def _sites(report: RankReport) -> list[Site]:
    sites = list(report.error.sites)
    if any(not is_library(site.file) for site in sites):
        return sites
    # The message of an error may quote that of another process.
    for text in (report.traceback, report.error.details):
        found = _FRAME_OF_TRACEBACK.finditer(text)
        quoted = [Site(frame["file"], int(frame["line"]), frame["function"]) for frame in found]
        if quoted:
            return quoted
    return sites


# -- the values of an assertion, and the end


def _values(first: RankReport, reports: Sequence[RankReport]) -> Iterator[Value]:
    """The further lines of what the culprit's exception says, without those that say nothing."""
    if is_victim(first) or first.error.cause is Cause.OF_ALL:
        return
    said = [line.rstrip() for line in without_colours(first.error.details).strip().splitlines()[1:] if line.strip()]
    # The two values first, then where they were and what came before, then how much they differ.
    values = [line for line in said if line.startswith(("Expected", "Got"))]
    of_rank = [f"(from rank {first.rank}; values differ on other ranks)"] if _differ(first, reports) else []
    where = [line for line in said if line.startswith("The failure occurred for")]
    # The last one is pytest's; the account has more.
    rest = [line for line in said if line not in (*values, *where) and not line.endswith("Use -v to get more diff")]
    yield from (Value(line, kind_of_value(line)) for line in (*values, *of_rank, *where, *first.error.related, *rest))


# torch, unittest and pytest write these, in the message of an assertion.
_GOT = re.compile(r" *(Got: |- |Expected .* but got )")
_EXPECTED = re.compile(r" *(Expected: |\+ )")


def kind_of_value(line: str) -> LineKind:
    """The kind of a line of an assertion's message, for its colour."""
    if _GOT.match(line):
        return LineKind.GOT
    return LineKind.EXPECTED if _EXPECTED.match(line) else LineKind.OTHER


def _printed(first: RankReport) -> Iterator[str]:
    lines = (line.strip() for line in without_colours(warnings_once(first.output, times=0)).splitlines())
    return (line for line in lines if line)


def _differ(first: RankReport, reports: Sequence[RankReport]) -> bool:
    alike = [r for r in reports if r.error.sites and r.error.sites[-1] == (first.error.sites or (None,))[-1]]
    return len({without_own_number(r.error.details, r.rank) for r in alike}) > 1


def _remarks(fault: Fault) -> Iterator[str]:
    title = fault.title[:_LONGEST_EXAMPLE]  # as much of it as a screen shows
    examples = (report.error.example for report in fault.reports)
    example = next((text for text in examples if text and text not in title), "")
    if example:
        yield cut(f"in this example: {' '.join(example.split())}", _LONGEST_EXAMPLE)
    others = [(finding.sentence, finding) for finding in other_findings(fault) if finding != fault.finding]
    if fault.finding is not None and not fault.tells_finding and not _screen_follows(fault):
        others.insert(0, (fault.finding.title, fault.finding))
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        yield _with_place(f"also: {others[0][0]}", others[0][1], more)
    left = [(r.rank, leftover) for r in fault.reports for leftover in r.leftovers]
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        yield cut(f"rank {left[0][0]} left running (now terminated): {left[0][1]}{more}", WIDTH)
    of_nccl = any(r.nccl is not None or r.error.type_name == nccl_status.ERROR_OF_NCCL for r in fault.reports)
    if of_nccl and fault.finding is None:
        yield cut(nccl_status.hint(), WIDTH)
    if fault.case.note:
        yield from fault.case.note.splitlines()[:2]


def other_findings(fault: Fault) -> list[Finding]:
    """The findings of the ranks that the title does not tell."""
    told = fault.finding if fault.tells_finding else None
    return [finding for report in fault.reports for finding in report.found if finding != told]


def _with_place(text: str, finding: Finding, more: str) -> str:
    """A text about a finding with what follows it, in the width of the screen: its line is not cut."""
    if len(text + more) <= WIDTH:
        return text + more
    places = {site.place for site in finding.sites}
    end = f"{'   ' + places.pop() if len(places) == 1 else ''}{more}"
    return f"{cut(text, WIDTH - len(end))}{end}"


def _screen_follows(fault: Fault) -> bool:
    """Whether the finding only says that the others wait for the culprits."""
    found = fault.finding
    return found is not None and found.kind is FindingKind.ABANDONED and set(found.ranks) <= set(fault.culprits)
