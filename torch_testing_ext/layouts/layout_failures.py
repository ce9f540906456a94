"""The failure of a layout: one screen and an account of it, and the exception that a test raises."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch_testing_ext import launch
from torch_testing_ext._collectives.failure import (
    MOST_SCREEN_LINES,
    WIDTH,
    FailureView,
    LineKind,
    RankRow,
    Value,
    height,
)
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._testing.bases.rank_verdicts import RankError, RankFailure
from torch_testing_ext._tests import kept_failures
from torch_testing_ext.layouts.layout_findings import LayoutFinding, LayoutReport

_MOST_NAMES = 4


class LayoutError(RankFailure):
    """A layout does not train as the reference, or the test cannot say whether it does."""

    def __init__(self, message: str, reports: Sequence[LayoutReport] = ()):
        super().__init__(message)
        # One for each layout that was compared, also of those that are right.
        self.reports = list(reports)


LayoutError.__module__ = f"{__name__.rpartition('.')[0]}"


def error_of(reports: Sequence[LayoutReport], case: launch.Case, reference: str) -> LayoutError:
    """The exception for reports of which some are wrong: the first in full, the others in a line each."""
    wrong = [report for report in reports if not report.is_right]
    view = view_of_report(wrong[0], case, reference)
    if wrong[1:]:
        lines = [report.summary for report in wrong[1:]]
        accounts = [view_of_report(report, case, reference).account for report in wrong[1:]]
        remarks = (*view.remarks, *lines[:_MOST_NAMES])
        view = replace(view, remarks=remarks, account="\n\n".join([view.account, *accounts]))
    error = LayoutError(view.screen if view.show_command else view.account_with_notes, reports)
    error.failure = view
    if case.kept_as:
        kept_failures.keep_report(case.kept_as, view.account)
    return error


def view_of_report(report: LayoutReport, case: launch.Case, reference: str) -> FailureView:
    """A report that is wrong, as a failure."""
    finding, show, again = report.finding, case.show_command, case.rerun_command
    if finding is None:
        account = _account(report, report.refusal)
        return FailureView(report.refusal, show_command=show, rerun_command=again, account=account)
    title = f"{report.layout} does not train as {reference}: {finding.title}"
    unknown = f"differs by {finding.size:.2g} of its largest element; no simple rule explains it"
    texts = [reason.text for reason in finding.reasons] or [unknown]
    values = [Value(line, LineKind.GOT) for text in texts for line in textwrap.wrap(text, WIDTH - 2)]
    view = FailureView(
        title,
        rows=tuple(_rows(finding)),
        values=tuple(values),
        account=_account(report, title),
        show_command=show,
        rerun_command=again,
    )
    # Only so many remarks that the reasons stay on the screen, and each of them whole.
    shown = len(view.parts().values)
    for remark in _remarks(report):
        longer = replace(view, remarks=(*view.remarks, *textwrap.wrap(remark, WIDTH)))
        if len(longer.parts().values) == shown and height(longer.screen) <= MOST_SCREEN_LINES:
            view = longer
    return view


def _rows(finding: LayoutFinding) -> Iterator[RankRow]:
    """The values of ranks; those with the same, at the same line, in one row."""
    alike: dict[tuple[str, Site | None], list[int]] = {}
    for rank, did in finding.shares.items():
        alike.setdefault((did, finding.sites.get(rank)), []).append(rank)
    for (did, site), ranks in alike.items():
        yield RankRow(tuple(ranks), did, site)


def _remarks(report: LayoutReport) -> Iterator[str]:
    finding = report.finding
    assert finding is not None
    yield from finding.notes
    if finding.compared > 1:
        names = ", ".join(finding.wrong[:_MOST_NAMES]) + (", ..." if len(finding.wrong) > _MOST_NAMES else "")
        yield f"{len(finding.wrong)} of {finding.compared} of this kind are wrong in this step: {names}"
    yield from (f"{other.title} differs too, by {other.size:.2g}" for other in report.others)


def _account(report: LayoutReport, title: str) -> str:
    lines = [title]
    finding = report.finding
    if finding is not None:
        lines += [f"  rank {rank}: {did}" for rank, did in finding.shares.items()]
        lines += [f"  {reason.text}" for reason in finding.reasons]
        lines += [f"  {remark}" for remark in _remarks(report)]
        if len(finding.wrong) > 1:
            lines += ["", "wrong in this step:", *(f"  {name}" for name in finding.wrong)]
        for other in report.others:
            lines += ["", f"{other.title}:", *(f"  {reason.text}" for reason in other.reasons)]
    if report.not_compared:
        lines += ["", "not compared:", *(f"  {name}: {why}" for name, why in report.not_compared.items())]
    return "\n".join(lines)


def with_layout(error: RankError | RankFailure, layout: str) -> RankError | RankFailure:
    """The error of ranks, with the layout's text before it."""
    if error.failure is None:
        return error
    view = replace(error.failure, within=f"{layout}: {error.failure.within}")
    renewed = type(error)(view.screen if view.show_command else view.account_with_notes)
    renewed.outcome, renewed.cause_of_failure, renewed.failure = error.outcome, error.cause_of_failure, view
    return renewed
