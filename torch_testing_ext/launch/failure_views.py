"""The view of a failure: what happened, the culprit first; the ranks, grouped by what they did; and the lines. Pure.

Nothing but the source is read. The account of the failure has the rest: all tracebacks, stacks and outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch_testing_ext._collectives.failure import (
    MOST_CONTEXT,
    MOST_PRINTED,
    MOST_SITES,
    WIDTH,
    FailureView,
    RankRow,
    RankWait,
    SourceLine,
    Value,
    kind_of_value,
)
from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.logs import cut, without_colours
from torch_testing_ext._process.same_texts import warnings_once, without_own_number
from torch_testing_ext._process.words import MOST_LINES, grouped
from torch_testing_ext._tests.source_files import source_text
from torch_testing_ext.launch import nccl_status
from torch_testing_ext.launch.account_writer import account_of
from torch_testing_ext.launch.causes import Cause
from torch_testing_ext.launch.failure_rows import JudgedFailure, rows_of, sites_of_report
from torch_testing_ext.launch.rank_reports import RankReport, is_victim, report_of
from torch_testing_ext.launch.verdict import Case

_LONGEST_EXAMPLE = 3 * WIDTH


def view_of_error(error: BaseException, case: Case, within: str = "", traceback: str = "") -> FailureView:
    """The view of an exception of a test without ranks. `within` begins the title and `traceback` ends the account."""
    account = account_of(error, isinstance(error, AssertionError), 0.0)
    report = report_of(0, account)
    title = f"{within}{account.summary}"
    failure = JudgedFailure(title, [report], case, (0,), told_summary=account.summary, is_alone=True)
    return view_of(failure, f"{title}\n\n{traceback}")


def view_of(failure: JudgedFailure, account: str, explained: Finding | None = None) -> FailureView:
    """The view of a failure. `explained`: the finding that its account shows."""
    rows = rows_of(failure)
    first = failure.first
    sites = list(dict.fromkeys(row.site for row in rows if row.site is not None))[:MOST_SITES]
    if first is not None and len(sites) == 1:
        in_test = next((site for site in reversed(sites_of_report(first)) if site.file == failure.case.file), sites[0])
        sites += [in_test] if in_test != sites[0] else []
    return FailureView(
        failure.title,
        rows=tuple(RankRow((), "", site) for site in sites[:1]) if failure.is_alone else tuple(rows),
        sites=tuple(sites),
        source=tuple(_source(sites)),
        values=tuple(_values(first, failure.reports)) if first is not None else (),
        printed=tuple(_printed(first))[-MOST_PRINTED:] if first is not None else (),
        remarks=tuple(_remarks(failure)),
        waits=tuple(_waits(explained)) if explained is not None else (),
        show_command=failure.case.show_command,
        rerun_command=failure.case.rerun_command,
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


def _printed(first: RankReport) -> Iterator[str]:
    lines = (line.strip() for line in without_colours(warnings_once(first.output, times=0)).splitlines())
    return (line for line in lines if line)


def _differ(first: RankReport, reports: Sequence[RankReport]) -> bool:
    alike = [r for r in reports if r.error.sites and r.error.sites[-1] == (first.error.sites or (None,))[-1]]
    return len({without_own_number(r.error.details, r.rank) for r in alike}) > 1


def _remarks(failure: JudgedFailure) -> Iterator[str]:
    title = failure.title[:_LONGEST_EXAMPLE]  # as much of it as a screen shows
    examples = (report.error.example for report in failure.reports)
    example = next((text for text in examples if text and text not in title), "")
    if example:
        yield cut(f"in this example: {' '.join(example.split())}", _LONGEST_EXAMPLE)
    others = [(finding.sentence, finding) for finding in other_findings(failure) if finding != failure.finding]
    if failure.finding is not None and not failure.tells_finding and not _screen_follows(failure):
        others.insert(0, (failure.finding.title, failure.finding))
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        yield _with_place(f"also: {others[0][0]}", others[0][1], more)
    left = [(r.rank, leftover) for r in failure.reports for leftover in r.leftovers]
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        yield cut(f"rank {left[0][0]} left running (now terminated): {left[0][1]}{more}", WIDTH)
    of_nccl = any(r.nccl is not None or r.error.type_name == nccl_status.ERROR_OF_NCCL for r in failure.reports)
    if of_nccl and failure.finding is None:
        yield cut(nccl_status.hint(), WIDTH)
    if failure.case.note:
        yield from failure.case.note.splitlines()[:2]


def other_findings(failure: JudgedFailure) -> list[Finding]:
    """The findings of the ranks that the title does not tell."""
    told = failure.finding if failure.tells_finding else None
    return [finding for report in failure.reports for finding in report.found if finding != told]


def _with_place(text: str, finding: Finding, more: str) -> str:
    """A text about a finding with what follows it, in the width of the screen: its line is not cut."""
    if len(text + more) <= WIDTH:
        return text + more
    places = {site.place for site in finding.sites}
    end = f"{'   ' + places.pop() if len(places) == 1 else ''}{more}"
    return f"{cut(text, WIDTH - len(end))}{end}"


def _screen_follows(failure: JudgedFailure) -> bool:
    """Whether the finding only says that the others wait for the culprits."""
    found = failure.finding
    return found is not None and found.kind is FindingKind.ABANDONED and set(found.ranks) <= set(failure.culprits)
