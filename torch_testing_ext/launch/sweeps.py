"""Runs a test once with each fault of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process.words import MOST_LINES
from torch_testing_ext._tests import notes
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext._tests.sweep_reports import SweepCell, SweepReport
from torch_testing_ext.faults import FaultPlan, PlannedFault, Sweep
from torch_testing_ext.launch.rank_reports import RankReport, failed_by_itself, is_victim
from torch_testing_ext.launch.verdict import Verdict

from .accounts import RankEnding


def sweep_verdict(sweep: Sweep, run: Callable[[FaultPlan], tuple[Sequence[RankReport], Verdict]]) -> Verdict:
    """Run a test as it is, and with each fault of a sweep; one verdict on all. `run` runs it once.

    What happened is noted for the runner.
    """
    reports, verdict = run(sweep.recording)
    if verdict.outcome is TestOutcome.SKIPPED:
        return verdict
    if verdict.outcome is not TestOutcome.PASSED:
        return verdict.with_note("This was the run without faults, which shows at which points they are to happen.")
    plans = sweep.plans({report.rank: report.faults.passed for report in reports})
    reached = _reached(reports)
    cells, verdicts = [], []
    for plan in plans:
        reports, verdict = run(plan)
        reached |= _reached(reports)
        cells.append(_cell(sweep, plan.faults[0], reports, verdict))
        verdicts.append(verdict)
    report = SweepReport(
        tuple(cells),
        sweep.wrong,
        "" if cells else f"its ranks pass no point of the kind: {sweep.at.where}",
        tuple(
            f"{each.fault}: there is no such point any more; known to {sweep.wrong.verb}: {each.reason}"
            for each in sweep.missing(plan.faults[0] for plan in plans)
        ),
        reached=tuple(sorted(reached)),
    )
    notes.note_sweep(report)
    first = next((verdict for cell, verdict in zip(cells, verdicts, strict=True) if report.is_wrong(cell)), None)
    return _verdict_on(report, first or Verdict(TestOutcome.PASSED))


def _verdict_on(report: SweepReport, first: Verdict) -> Verdict:
    """One verdict on all runs; `first`: that of the first one that fails the test."""
    title = report.title()
    if not title:
        return Verdict(TestOutcome.PASSED)
    failure = first.failure or FailureView.of_text(title)
    lines = [report.line(cell) for cell in report.cells]
    account = f"{title}\n\n{report.text()}\n\n{failure.account}"
    failure = replace(failure, title=title, account=account, remarks=(*lines[:MOST_LINES], *failure.remarks))
    outcome = TestOutcome.FAILED if first.outcome is TestOutcome.PASSED else first.outcome
    return replace(first, outcome=outcome, failure=failure)


def _reached(reports: Sequence[RankReport]) -> set[str]:
    """The names that ranks have given to `reached` and to `fault_point`."""
    marks = {name.removeprefix("mark ") for r in reports for name in r.faults.passed if name.startswith("mark ")}
    return marks.union(*(r.faults.reached for r in reports))


def _cell(sweep: Sweep, fault: PlannedFault, reports: Sequence[RankReport], verdict: Verdict) -> SweepCell:
    """The cell of a run with this fault: what it did."""
    victim = next(report for report in reports if report.rank == fault.rank)
    place = "".join(happened.place for happened in victim.faults.happened)
    cell = SweepCell(
        str(fault),
        str(replace(fault, rank=None, at=None)),
        victim.rank,
        str(fault.at),
        place,
        _outcome_of(sweep, victim, reports, verdict),
        was_noticed=_noticed(reports),
        came_too_late=bool(victim.faults.missed),
        known=sweep.why_known(fault),
    )
    if not cell.is_pass:
        title = verdict.failure.title if verdict.failure is not None else verdict.text
        cell = replace(cell, title=f"{verdict.outcome.value}: {title}")
    if not victim.faults.happened:
        return cell
    at = victim.faults.happened[-1].at
    others = [report for report in reports if report is not victim or report.ending is not RankEnding.FAULT]
    failed = [report for report in others if report.ending.is_failure and report.ending is not RankEnding.STOPPED]
    first = min(failed, key=lambda report: report.ended, default=None)
    if cell.outcome is TestOutcome.ERROR and first is not None:
        return replace(cell, error=first.error.type_name or first.ending.value, seconds=first.ended - at)
    return replace(cell, seconds=max((report.ended - at for report in others), default=None))


def _outcome_of(sweep: Sweep, victim: RankReport, reports: Sequence[RankReport], verdict: Verdict) -> TestOutcome:
    if victim.faults.missed or not victim.faults.happened:
        return TestOutcome.SKIPPED
    # Where only a hang is sought, ranks that pass have passed, however long that took.
    have_ended = all(report.ending in (RankEnding.PASSED, RankEnding.FAULT) for report in reports)
    if verdict.outcome is TestOutcome.PASSED or (have_ended and sweep.wrong.is_of_run):
        return TestOutcome.PASSED
    were_ended = any(report.ending is RankEnding.STOPPED for report in reports)
    have_failed = any(failed_by_itself(report) or is_victim(report) for report in reports)
    is_hang = verdict.outcome is TestOutcome.TIMEOUT or (were_ended and not have_failed)
    return TestOutcome.TIMEOUT if is_hang else TestOutcome.ERROR


def _noticed(reports: Sequence[RankReport]) -> bool:
    """Whether a call of a rank has raised that has passed."""
    records = [r.issued for r in reports if r.issued is not None and r.ending is RankEnding.PASSED]
    return any(call.raised for record in records for calls in record.calls.values() for call in calls)
