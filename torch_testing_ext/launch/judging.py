"""Judges a test: one outcome and one message from how every rank ended. Pure: no process, no file, no clock."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_testing_ext._collectives.findings.abandoned_calls import (
    ended_under_way,
    first_abandoned,
    latest_call_in_words,
)
from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._collectives.findings.mismatches import first_mismatch
from torch_testing_ext._collectives.findings.other_members import first_unlike_lists
from torch_testing_ext._collectives.findings.uneven_calls import first_uneven, first_unmatched
from torch_testing_ext._collectives.records.issued_calls import GroupKey, RankRecord
from torch_testing_ext._process.ends import describe_exit
from torch_testing_ext._process.same_texts import without_accidents
from torch_testing_ext._process.signals import signal_name
from torch_testing_ext._process.words import list_of
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext._torch.signs.error_texts import without_cpp_place
from torch_testing_ext.launch.accounts import RankAccount, RankEnding
from torch_testing_ext.launch.causes import Cause
from torch_testing_ext.launch.failure_rows import JudgedFailure
from torch_testing_ext.launch.failure_verdicts import of_all, verdict_on
from torch_testing_ext.launch.fault_checks import without_fault, without_recovery
from torch_testing_ext.launch.rank_reports import RankReport, ended, is_victim, records_of
from torch_testing_ext.launch.time_outs import judge_time_out
from torch_testing_ext.launch.verdict import Case, Expected, Verdict

if TYPE_CHECKING:
    from torch_testing_ext.faults import FaultPlan

_NO_SUCH_MEMORY = os.strerror(errno.EFAULT)  # gloo was to send a buffer that has been freed

# The outcome after the first rank's ending; after any other, its process has crashed.
_OUTCOME_OF = {
    RankEnding.FAILED: TestOutcome.FAILED,
    RankEnding.ERROR: TestOutcome.ERROR,
    RankEnding.LOST: TestOutcome.ERROR,
}


def judge(
    reports: Sequence[RankReport],
    timed_out: bool,
    case: Case,
    expected: Expected | None = None,
    finding: Finding | None = None,
) -> Verdict:
    """The verdict on a test, from the reports of all its ranks, and the finding for which they were ended, if any."""
    expected = expected or Expected()
    if expected.faults is None:
        verdict = _judge(reports, timed_out, case, expected, finding)
    else:
        verdict = _judge_with_faults(reports, timed_out, case, expected, expected.faults, finding)
    in_use = any(report.error.cause is Cause.PORT_IN_USE for report in reports)
    return replace(verdict, cause=Cause.PORT_IN_USE) if in_use else verdict


def _judge(
    reports: Sequence[RankReport], timed_out: bool, case: Case, expected: Expected, finding: Finding | None
) -> Verdict:
    if interrupted := [r.rank for r in reports if r.in_flight is not None]:
        # A rank that was ended while an exception was in flight has failed by that.
        reports = [r if r.in_flight is None else _ended_by(r, r.in_flight) for r in reports]
        return _failed(reports, [r for r in reports if r.rank in interrupted], case, expected, finding)
    skips = [r for r in reports if r.ending is RankEnding.SKIPPED]
    if finding is not None and not _waits_only_for(finding, skips):
        if finding.kind is FindingKind.MISMATCH:  # since it was found, other ranks may have come to the same collective
            finding = _mismatch(reports, expected, unless_raised=expected.faults is not None) or finding
        finding = _unlike_groups(reports, expected) or finding
        return _found(reports, finding, case)
    running = [r for r in reports if r.ending is RankEnding.STOPPED]
    deciding = [r for r in reports if expected.decides(r) and r not in running]
    if timed_out and (running or not deciding):
        unlike = _unlike_groups(reports, expected)
        return judge_time_out(reports, running, case, unlike, _known(reports))
    if deciding:
        return _failed(reports, deciding, case, expected)
    if len(skips) == len(reports) and not expected.any_code:
        return Verdict(TestOutcome.SKIPPED, skips[0].summary, code=skips[0].code)
    # If any code is allowed, so is that of a skip; but a rank that had to be ended never makes a pass.
    if running or (skips and not expected.any_code):
        alone = _abandoned(reports)
        return _disagree(reports, skips or running, case) if alone is None else _found(reports, alone, case)
    if expected.code is not None and not expected.any_code and reports[0].code != expected.code:
        title = f"rank 0 of {len(reports)} should have ended with {_code(expected.code)}, but ended with "
        return verdict_on(
            TestOutcome.FAILED, JudgedFailure(title + _code(reports[0].code), reports, case, (0,)), [reports[0]]
        )
    mismatch = _unlike_groups(reports, expected) or _mismatch(reports, expected, unless_raised=True)
    if mismatch is not None:
        return _found(reports, mismatch, case)
    return _found_by_sanitizer(reports, case, expected)


def _waits_only_for(finding: Finding, skips: Sequence[RankReport]) -> bool:
    """Whether ranks wait for each other only since the others have skipped: then that is the cause."""
    if finding.kind is not FindingKind.DEADLOCK:
        return False
    awaited = {rank for line in finding.lines if isinstance(line, Doing) for rank in line.awaited}
    return bool(awaited) and awaited <= {report.rank for report in skips}


def _judge_with_faults(
    reports: Sequence[RankReport],
    timed_out: bool,
    case: Case,
    expected: Expected,
    plan: FaultPlan,
    finding: Finding | None,
) -> Verdict:
    """Each fault has to happen; then the test has to pass; then the recovery must have run, and in time."""
    wrong = without_fault(reports, plan)
    if wrong is None:
        verdict = _judge(reports, timed_out, case, expected, finding)
        wrong = without_recovery(reports, plan) if verdict.outcome is TestOutcome.PASSED else None
        if wrong is None:
            return verdict
    title, culprits = wrong
    return verdict_on(TestOutcome.FAILED, JudgedFailure(title, reports, case, culprits), [])


def _ended_by(report: RankReport, account: RankAccount) -> RankReport:
    """The report of a rank that has failed, or skipped, by the exception that an account is about."""
    return replace(report, ending=account.ending, account=account)


def _found_by_sanitizer(reports: Sequence[RankReport], case: Case, expected: Expected) -> Verdict:
    """Judge ranks that passed with matching collectives: sanitizer findings and unmatched calls."""
    if not expected.is_uneven and any(r.issued for r in reports):
        unmatched = first_unmatched(records_of(reports))
        if unmatched is not None:
            reports = [replace(reports[0], found=(*reports[0].found, unmatched)), *reports[1:]]
    found = sorted(
        (finding for r in reports for finding in r.found if not finding.is_hazard), key=lambda finding: finding.gravity
    )
    if found:
        return _found(reports, found[0], case)
    hazards = [finding for r in reports for finding in r.found]
    if not expected.is_uneven:
        hazards += [] if any(r.issued for r in reports) else _left_out(records_of(reports))
    not_compared = "" if expected.is_uneven else _not_compared(reports)
    remarks = [not_compared, *(f"{hazard.sentence}\n{hazard.calls}" for hazard in hazards)]
    return Verdict(TestOutcome.PASSED, "\n".join(filter(None, remarks)))


def _left_out(records: Sequence[RankRecord]) -> list[Finding]:
    """A collective or message that some ranks have left out, as torch's recorders show it."""
    finding = first_uneven(records) or first_unmatched(records, only_messages=True)
    return [] if finding is None else [finding]


def _not_compared(reports: Sequence[RankReport]) -> str:
    """Warn about ranks whose collectives could not be compared."""
    lost = [record.rank for record in records_of(reports) if not record.is_whole]
    if not lost:
        return ""
    recorder = "the sanitizer's log" if any(r.issued for r in reports) else "torch's recorder"
    return f"the collectives of {list_of(lost)} were not compared: there are more than {recorder} keeps"


def _mismatch(reports: Sequence[RankReport], expected: Expected, unless_raised: bool = False) -> Finding | None:
    """The first collective in which ranks disagree, unless the test allows that. See `first_mismatch`."""
    if expected.faults is not None and not expected.may_differ:
        return _mismatch_of_survivors(reports, unless_raised)
    records = [] if expected.may_differ else records_of(reports)
    # Ranks that have issued nothing cannot disagree.
    if not any(record.calls or record.messages for record in records):
        return None
    return first_mismatch(records, unless_raised)


def _unlike_groups(reports: Sequence[RankReport], expected: Expected) -> Finding | None:
    """The first group for which ranks have given other members, unless the test allows that."""
    recorded = [r.recorder for r in reports if r.recorder is not None]
    return None if expected.is_uneven else first_unlike_lists(recorded)


def _cause(reports: Sequence[RankReport], expected: Expected) -> Finding | None:
    """The fault in the collectives that may explain failures."""
    known = {finding.kind: finding for finding in reversed(_known(reports))}
    mismatch = _unlike_groups(reports, expected) or _mismatch(reports, expected)
    return mismatch or known.get(FindingKind.RACE) or _abandoned(reports) or known.get(FindingKind.UNWAITED)


def _known(reports: Sequence[RankReport]) -> list[Finding]:
    """The findings of ranks that explain hangs and crashes, the gravest first."""
    found = (
        finding for r in reports for finding in r.found if finding.kind in (FindingKind.RACE, FindingKind.UNWAITED)
    )
    return sorted(found, key=lambda one: one.gravity)


def _abandoned(reports: Sequence[RankReport]) -> Finding | None:
    waiting = [r.rank for r in reports if _lost_a_peer(r) or r.ending is RankEnding.STOPPED]
    alone = {r.rank: ended(r) for r in reports if r.rank not in waiting}
    return first_abandoned(_records_of_survivors(reports), alone, waiting) if waiting else None


def _lost_a_peer(report: RankReport) -> bool:
    return report.ending is RankEnding.ERROR and report.error.cause.is_of_peers


def _found(reports: Sequence[RankReport], finding: Finding, case: Case) -> Verdict:
    """The verdict where the collectives are at fault."""
    shown = [r for r in reports if r.ending.is_failure and r.ending is not RankEnding.STOPPED]
    is_error = finding.kind in (FindingKind.DEADLOCK, FindingKind.ABANDONED, FindingKind.RECORDER)
    failure = JudgedFailure(finding.title, reports, case, finding.ranks, finding, tells_finding=True)
    calls = f"{finding.sentence}\n{finding.calls}"
    return verdict_on(TestOutcome.ERROR if is_error else TestOutcome.FAILED, failure, shown, calls, finding)


def _failed(
    reports: Sequence[RankReport],
    deciding: list[RankReport],
    case: Case,
    expected: Expected,
    finding: Finding | None = None,
) -> Verdict:
    culprits = sorted(deciding, key=lambda r: (_lost_a_peer(r), r.ended, r.rank))
    first = culprits[0]
    # Whoever has lost a rank by a fault of the test had to expect that.
    has_fault = any(r.ending is RankEnding.FAULT for r in reports)
    cause = finding or (_mismatch(reports, expected) or _abandoned(reports) if has_fault else _cause(reports, expected))
    if cause is not None and (
        _lost_a_peer(first)
        or _may_follow_from(cause, first)
        or _precedes(cause, first, _mismatch(reports, expected, unless_raised=True))
    ):
        return _found(reports, cause, case)
    left = _peer_that_left(reports, first, has_fault)
    if left is not None:
        return _found(reports, left, case)
    others = [r.rank for r in culprits if r is not first and not _lost_a_peer(r) and _failed_alike(r, first)]
    alike = [first.rank, *others]
    if first.error.cause is Cause.OF_ALL and len(culprits) > 1:  # it names the ranks
        title = first.error.title
    elif case.is_script and first.ending is RankEnding.EXITED:
        title = f"{case.name} {describe_exit(first.code)} in {of_all(alike, len(reports))}"
    else:
        title = f"{of_all(alike, len(reports))} {_what_happened(first, len(alike))}"
    shown = [r for r in culprits if r is first or not (is_victim(r) or r.error.cause is Cause.OF_ALL)]
    outcome = _OUTCOME_OF.get(first.ending, TestOutcome.CRASHED)
    failure = JudgedFailure(title, reports, case, tuple(alike), cause, told_summary=first.summary)
    return verdict_on(outcome, failure, shown, cause.text if cause else "", cause)


def _peer_that_left(reports: Sequence[RankReport], lost: RankReport, has_fault: bool) -> Finding | None:
    """The ranks that have passed, by which this rank has lost its peer: not by one that a fault has ended."""
    passed = [r.rank for r in reports if r.ending is RankEnding.PASSED]
    if lost.error.cause is not Cause.LOST_PEER or not passed:
        return None
    latest = {record.rank: latest_call_in_words(record) for record in records_of(reports)}
    kept = [one for one in _records_of_survivors(reports) if latest_call_in_words(one) == latest[one.rank]]
    left = ended_under_way(kept, passed, [r.rank for r in reports if _lost_a_peer(r)])
    if left is None or not has_fault:
        return left
    # The dead may have been a peer in other things than calls, such as a store.
    call, lines = _call_and_lines(left, lost)
    return left if call in lines else None


def _mismatch_of_survivors(reports: Sequence[RankReport], unless_raised: bool) -> Finding | None:
    """The first collective or message in which survivors disagree, in groups that none of the dead was in."""
    survivors = _records_of_survivors(reports)
    # A rank may catch the error of a call that its peer's death has ended. A later mismatch comes first.
    later = first_mismatch(survivors, unless_raised=True)
    return later if later is not None or unless_raised else first_mismatch(survivors)


def _records_of_survivors(reports: Sequence[RankReport]) -> list[RankRecord]:
    """The records of ranks that no fault has ended, in groups of which no process has died by a fault."""
    dead = [r.rank for r in reports if r.ending is RankEnding.FAULT]
    begun_again = [r.rank for r in reports if r.rank not in dead and r.faults.ended_in(0)]
    records = records_of(reports)
    keys = {record.rank: {_any_backend(key) for key in record.groups} for record in records}
    lost_with_dead = set().union(*(keys.get(rank, set()) for rank in dead))
    survivors = []
    for record in records:
        if record.rank not in dead:
            lost = set(lost_with_dead)
            for key, group in record.groups.items():
                if any(rank in group.members and _any_backend(key) not in keys.get(rank, ()) for rank in begun_again):
                    lost.add(_any_backend(key))
            calls = {key: of for key, of in record.calls.items() if _any_backend(key) not in lost}
            messages = {key: of for key, of in record.messages.items() if _any_backend(key) not in lost}
            survivors.append(replace(record, calls=calls, messages=messages))
    return survivors


def _any_backend(key: GroupKey) -> GroupKey:
    return key._replace(backend="")


def _precedes(cause: Finding, failed: RankReport, not_expected: Finding | None) -> bool:
    """Whether a mismatch comes before the error of this rank, which may follow from it.

    The call of the rank is on the line that has raised, or above it in a function through which the error came, and
    the test has not gone on after an error of that call. What an `except` or a `finally` calls is below.
    """
    if cause.kind is not FindingKind.MISMATCH or failed.in_flight is not None:
        return False
    call, lines = _call_and_lines(cause, failed)
    return call in lines or (cause == not_expected and any(call < line for line in lines))


def _call_and_lines(cause: Finding, failed: RankReport) -> tuple[int, list[int]]:
    """The line of the rank's call in a finding, and those of the same function through which its error came."""
    doings = (line for line in cause.lines if isinstance(line, Doing))
    site = next((line.site for line in doings if line.rank == failed.rank), None)
    if site is None:
        return 0, []
    return site.line, [one.line for one in failed.error.sites if (one.file, one.function) == (site.file, site.function)]


def _failed_alike(one: RankReport, other: RankReport) -> bool:
    """Whether two ranks have failed at the same place in the same way, whatever the values."""
    if one is other:
        return True
    if one.ending is not other.ending or one.code != other.code:
        return False
    if one.ending in (RankEnding.FAILED, RankEnding.ERROR):
        place = one.place_of_failure
        return one.summary == other.summary if place is None else place == other.place_of_failure
    return without_accidents(one.summary) == without_accidents(other.summary)


def _may_follow_from(cause: Finding, crash: RankReport) -> bool:
    """Whether a failure may be due to this fault. gloo aborts for a mismatch; a freed buffer may end a rank anyhow."""
    is_race = cause.kind in (FindingKind.RACE, FindingKind.UNWAITED)
    has_crashed = crash.ending is RankEnding.KILLED or _NO_SUCH_MEMORY in crash.summary
    return crash.in_flight is None and (crash.code == -signal.SIGABRT or (is_race and has_crashed))


def _disagree(reports: Sequence[RankReport], ones: list[RankReport], case: Case) -> Verdict:
    """`ones` skipped, or had to be ended while they were running; the others did not."""
    others = [r.rank for r in reports if r not in ones]
    verb, opposite = ("skipped", "did not") if ones[0].ending is RankEnding.SKIPPED else ("did not end", "did")
    besides = f", {list_of(others)} {opposite}" if others else ""
    ranks = tuple(r.rank for r in ones)
    title = f"{list_of(ranks)} {verb}{besides}"
    return verdict_on(TestOutcome.FAILED, JudgedFailure(title, reports, case, ranks), [])


def _what_happened(report: RankReport, ranks: int) -> str:
    """Describe the end of a rank, or of that many ranks that ended alike, as a predicate."""
    was = "was" if ranks == 1 else "were"
    if report.ending is RankEnding.KILLED:
        return f"{was} {describe_exit(report.code, as_participle=True)}"
    if report.ending is RankEnding.EXITED:
        return f"{describe_exit(report.code)} before the test finished"
    if report.ending is RankEnding.LOST:
        return f"{was} lost: {report.summary}"
    if (fault := report.uncaught_fault) is not None:
        return f"did not catch {report.error.type_name}, which the fault raised {fault.place}"
    if report.ending is RankEnding.FAILED:
        return f"failed: {without_cpp_place(report.summary)}"
    return f"raised {without_cpp_place(report.summary)}"


def _code(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"exit code {code}" + (f" ({signal_name(-code)})" if code < 0 else "")
