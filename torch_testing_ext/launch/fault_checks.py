"""Checks of ranks against the faults of their test: which ends they explain, and which have not happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_testing_ext.launch.accounts import RankEnding
from torch_testing_ext.launch.rank_reports import RankReport
from torch_testing_ext.launch.seen_faults import FaultsSeen

if TYPE_CHECKING:
    from torch_testing_ext.faults import FaultPlan


def with_faults(report: RankReport, seen: FaultsSeen, is_frozen: bool, plan: FaultPlan) -> RankReport:
    """The report of a rank with the faults that have happened to it: an end by the latest one is expected.

    `is_frozen`: it was ended while a fault had it stopped.
    """
    report = replace(report, faults=seen)
    if not seen.happened:
        return report
    fault = seen.happened[-1].fault
    code = report.exit.code if report.exit is not None else None
    is_by_fault = fault.is_deadly and code == fault.exit_code
    ends_rank = fault.ends_rank or (plan.uncaught_ends and fault.kind == "raises")
    if ends_rank and report.ending in (RankEnding.FAILED, RankEnding.ERROR):
        is_by_fault = report.error.type_name == fault.error_type
    return replace(report, ending=RankEnding.FAULT) if is_by_fault or is_frozen else report


def without_fault(reports: Sequence[RankReport], plan: FaultPlan) -> tuple[str, tuple[int, ...]] | None:
    """Say which fault has not happened although its rank came to the end, and which rank that is; None if none."""
    for index, fault in enumerate(plan.faults):
        report = next(r for r in reports if r.rank == fault.rank)
        seen = report.faults
        if report.ending.is_failure or any(happened.index == index for happened in seen.happened):
            continue
        why = f"rank {report.rank} had ended before"
        if report.rank in plan.restarts and seen.ended_in(fault.incarnation):
            why = f"its process had ended before; incarnation={fault.incarnation + 1} is the next one of the rank"
        if fault.incarnation > seen.processes:
            why = f"rank {report.rank} has had {seen.processes + 1} processes"
        if index in seen.missed:
            why = f"{seen.missed[index]} was over before it could: use phase='before' or 'after'"
        elif fault.at is not None and index in seen.counts:
            number = seen.counts[index]
            issued = [f"{times} {name}" for name, times in seen.passed.items()]
            why = f"rank {report.rank} came to {number} {fault.at.counted.format(s='' if number == 1 else 's')}"
            why += f" (in all: {', '.join(issued) or 'nothing'})"
        return f"{fault} did not happen: {why}", (report.rank,)
    return None


def without_recovery(reports: Sequence[RankReport], plan: FaultPlan) -> tuple[str, tuple[int, ...]] | None:
    """Say what is wrong with ranks that have passed: one came too late, or none to a line that must run."""
    for victim, fault in [(r.rank, fault) for r in reports for fault in r.faults.happened]:
        for report in reports:
            after = report.ended - fault.at
            if plan.within is not None and report.rank != victim and after > plan.within:
                late = f"rank {report.rank} ended {after:.1f} s after rank {victim} {fault}"
                return f"{late}; within={plan.within:g}", (report.rank,)
    first = min((fault.at for r in reports for fault in r.faults.happened), default=0.0)
    reached = {name for r in reports for name, at in r.faults.reached.items() if at >= first}
    before = {name for r in reports for name in r.faults.reached} - reached
    missing = [name for name in plan.must_reach if name not in reached]
    if not missing:
        return None
    others = f"; reached were {', '.join(map(repr, sorted(reached)))}" if reached else ""
    if before.intersection(missing):
        others = f" after the fault{others}"
    return f"no rank has reached {', '.join(map(repr, missing))}{others}", ()
