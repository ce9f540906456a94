"""A failure that is judged, and its rows: the ranks by what they did, the culprits first, with their lines. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_testing_ext._collectives.failure import (
    RankRow,
)
from torch_testing_ext._collectives.findings.abandoned_calls import latest_call_in_words
from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._collectives.records.issued_calls import INIT, RankRecord
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.ends import describe_exit
from torch_testing_ext._process.logs import without_colours
from torch_testing_ext._process.same_texts import without_accidents
from torch_testing_ext._process.words import group_by
from torch_testing_ext._tests.source_files import is_library
from torch_testing_ext._torch.signs.error_texts import without_cpp_place
from torch_testing_ext.launch import hang
from torch_testing_ext.launch.accounts import RankEnding
from torch_testing_ext.launch.causes import Cause
from torch_testing_ext.launch.probable_exits import calls_that_exit, probable_lines_of_exit
from torch_testing_ext.launch.rank_reports import RankReport, ended, is_victim
from torch_testing_ext.launch.verdict import Case


@dataclass(frozen=True)
class JudgedFailure:
    """A failure that is judged. `culprits`: the ranks that caused it, the first one first."""

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


class _Seen(NamedTuple):
    """The doing of one rank, and its place. Ranks whose `kind` and `place` are equal did the same."""

    rank: int
    did: str
    site: Site | None
    kind: object
    place: Site | None
    brief: str = ""


def rows_of(failure: JudgedFailure) -> list[RankRow]:
    lines = failure.finding.lines if failure.finding is not None else ()
    doing = {line.rank: line for line in lines if isinstance(line, Doing)}
    culprits = set(failure.culprits)
    victims = {r.rank for r in failure.reports if r.rank not in doing and _is_victim(r, failure)} - culprits
    known = {r.rank: call for r in failure.reports if r.rank in victims and (call := _call_of_victim(r)) is not None}
    victims -= known.keys()
    others = (r for r in failure.reports if r.rank not in victims and r.rank not in known)
    # One that tells what failed in all ranks comes first, since it knows the line.
    seen = [_seen(report, doing, failure) for report in sorted(others, key=lambda r: r.rank not in culprits)]
    seen += known.values()
    alike = group_by(seen, lambda one: (one.kind, one.place))
    rows = [
        RankRow(tuple(sorted(seen.rank for seen in same)), same[0].did, same[0].site, same[0].brief) for same in alike
    ]
    if victims:
        lost = "lost its peer" if len(victims) == 1 else "lost their peer"
        were_ended = any(r.rank in victims and r.ending is RankEnding.STOPPED for r in failure.reports)
        in_order = tuple(r.rank for r in failure.reports if r.rank in victims)
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


def _seen(report: RankReport, doing: Mapping[int, Doing], failure: JudgedFailure) -> _Seen:
    call = doing.get(report.rank)
    if call is not None and report.in_flight is None:
        # However the ranks have ended: those that called the same share a row, and no others.
        # A call of a thread may have no line of the program.
        site = call.site or site_of(report, failure.case.file)
        return _Seen(report.rank, call.did, site, call.did, site, call.brief)
    did, site = _did(report, doing, failure)
    return _Seen(report.rank, did, site, _kind_of(report, did), None if report.error.cause is Cause.OF_ALL else site)


def _is_victim(report: RankReport, failure: JudgedFailure) -> bool:
    """Whether this rank only lost its peer, or was stopped for the failure of another."""
    first = failure.first
    has_failed = first is not None and first.ending.is_failure and first.ending is not RankEnding.STOPPED
    return is_victim(report) or (has_failed and report.ending is RankEnding.STOPPED)


def _kind_of(report: RankReport, did: str) -> object:
    """A key for what a rank did: of ranks that failed, the type of the exception and not its text."""
    if report.error.cause is Cause.OF_ALL:
        return report.error.cause
    if report.ending in (RankEnding.FAILED, RankEnding.ERROR) and report.error.sites:
        return report.ending, report.error.type_name
    return without_accidents(did)


def _did(report: RankReport, doing: Mapping[int, Doing], failure: JudgedFailure) -> tuple[str, Site | None]:
    """The end of a rank of which the finding says nothing, or the line where it still is."""
    site = site_of(report, failure.case.file)
    match report.ending:
        case RankEnding.PASSED:
            missed, lines = _left_at(report, doing, failure)
            if missed is None or not lines:
                return "passed", None
            where = "" if len(lines) == 1 else f" at line {' or '.join(map(str, lines))}"
            return f"passed, probably left{where}", missed._replace(line=lines[0])
        case RankEnding.SKIPPED:
            return f"skipped: {report.summary}", None
        case RankEnding.FAILED | RankEnding.ERROR:
            if report.error.example and report.rank not in failure.culprits:
                return "lost its peer in an example", site
            is_told = report.summary in ("", failure.told_summary) or report.error.cause is Cause.OF_ALL
            verb = "failed" if report.ending is RankEnding.FAILED else "raised"
            return verb if is_told else without_colours(without_cpp_place(report.summary)), site
        case RankEnding.STOPPED:
            trouble = report.nccl.trouble if report.nccl is not None else ""
            did, site = _still_running(report.recorder, site, failure.case.file)
            return "; ".join(filter(None, (did, trouble))), site
        case RankEnding.LOST:
            return "was lost", None
        case RankEnding.UNSTARTED:
            return report.ending.value, None
        case RankEnding.FAULT:
            return ended(report), None
        case RankEnding.EXITED if site is None:
            # An exit leaves no trace of where.
            calls = calls_that_exit(failure.case.file, failure.case.function)
            at = "here" if len(calls) == 1 else f"at line {' or '.join(map(str, calls))}"
            probably = [f"probably {at}"] if calls else []
            first = next((Site(failure.case.file, *call) for call in calls.items()), None)
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


def _left_at(report: RankReport, doing: Mapping[int, Doing], failure: JudgedFailure) -> tuple[Site | None, list[int]]:
    """The call that others are in, and the lines of its function where a rank that passed has probably left before."""
    kinds = (FindingKind.ABANDONED, FindingKind.BEHIND)
    missed = next((doing_of_rank.site for doing_of_rank in doing.values() if doing_of_rank.site is not None), None)
    if report.rank not in failure.culprits or failure.finding is None or failure.finding.kind not in kinds:
        return None, []
    if missed is None or is_library(missed.file):
        return None, []
    record = report.recorder or report.issued
    latest = record.latest.site if record is not None and record.latest is not None else None
    last = latest.line if latest is not None and latest.file == missed.file else None
    return missed, probable_lines_of_exit(missed.file, missed.function, last, missed.line)


_FRAME_OF_TRACEBACK = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


def site_of(report: RankReport, file: str) -> Site | None:
    """Find the line where a rank ended or is: the innermost one outside libraries."""
    if report.stacks and not report.error.sites:
        return hang.site_of_rank(report.stacks, file)
    sites = sites_of_report(report)
    own = [site for site in sites if not is_library(site.file)]
    return next(iter(own[::-1] or sites[::-1]), None)


def sites_of_report(report: RankReport) -> list[Site]:
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
