"""Judges a test: one outcome and one message from how every rank ended. Pure: no process, no file, no clock."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch_testing_ext._collectives.findings.abandoned_calls import ended_under_way, first_abandoned
from torch_testing_ext._collectives.findings.deadlocks import deadlocked, describe_deadlock, waiting_calls
from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._collectives.findings.mismatches import first_mismatch
from torch_testing_ext._collectives.findings.other_members import first_unlike_lists
from torch_testing_ext._collectives.findings.uneven_calls import differences, first_uneven, first_unmatched
from torch_testing_ext._collectives.proof.store_waits import suspected_creation
from torch_testing_ext._collectives.records.issued_calls import GroupKey, RankRecord
from torch_testing_ext._process.ends import describe_exit
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._process.same_texts import warnings_once, without_accidents, without_own_number
from torch_testing_ext._process.signals import signal_name
from torch_testing_ext._process.words import MOST_LINES, count, few, group_by, list_of, verb_for
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext._torch.signs.error_texts import without_cpp_place
from torch_testing_ext.faults import FaultPlan
from torch_testing_ext.launch import hang, nccl_status
from torch_testing_ext.launch.accounts import RankAccount, RankEnding
from torch_testing_ext.launch.causes import Cause
from torch_testing_ext.launch.failure_views import Fault, other_findings, view_of
from torch_testing_ext.launch.fault_checks import uncaught, without_fault, without_recovery
from torch_testing_ext.launch.rank_reports import RankReport, ended, is_victim
from torch_testing_ext.launch.verdict import Case, Expected, Verdict

LONGEST_OUTPUT = 6_000
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
            finding = _mismatch(reports, expected) or finding
        finding = _unlike_groups(reports, expected) or finding
        return _found(reports, finding, case)
    running = [r for r in reports if r.ending is RankEnding.STOPPED]
    deciding = [r for r in reports if expected.decides(r) and r not in running]
    if timed_out and (running or not deciding):
        return _timed_out(reports, running, case, expected)
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
        return _verdict(TestOutcome.FAILED, Fault(title + _code(reports[0].code), reports, case, (0,)), [reports[0]])
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


# -- faults of the test


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
    return _verdict(TestOutcome.FAILED, Fault(title, reports, case, culprits), [])


def _after_faults(fault: Fault) -> Fault:
    """The failure with the faults of the test in its title that have happened before."""
    happened = [f"rank {r.rank} {each}" for r in fault.reports for each in r.faults.happened if each is not uncaught(r)]
    untold = [text for text in happened if text not in fault.title]
    return replace(fault, title=f"after {' and '.join(untold)}: {fault.title}") if untold else fault


def _ended_by(report: RankReport, account: RankAccount) -> RankReport:
    """The report of a rank that has failed, or skipped, by the exception that an account is about."""
    return replace(report, ending=account.ending, account=account)


def _found_by_sanitizer(reports: Sequence[RankReport], case: Case, expected: Expected) -> Verdict:
    """Judge ranks that passed with matching collectives: sanitizer findings and unmatched calls."""
    if not expected.is_uneven and any(r.issued for r in reports):
        unmatched = first_unmatched(_records(reports))
        if unmatched is not None:
            reports = [replace(reports[0], found=(*reports[0].found, unmatched)), *reports[1:]]
    found = sorted(
        (finding for r in reports for finding in r.found if not finding.is_hazard), key=lambda finding: finding.gravity
    )
    if found:
        return _found(reports, found[0], case)
    hazards = [finding for r in reports for finding in r.found]
    if not expected.is_uneven:
        hazards += [] if any(r.issued for r in reports) else _left_out(_records(reports))
    not_compared = "" if expected.is_uneven else _not_compared(reports)
    remarks = [not_compared, *(f"{hazard.sentence}\n{hazard.calls}" for hazard in hazards)]
    return Verdict(TestOutcome.PASSED, "\n".join(filter(None, remarks)))


def _left_out(records: Sequence[RankRecord]) -> list[Finding]:
    """A collective or message that some ranks have left out, as torch's recorders show it."""
    finding = first_uneven(records) or first_unmatched(records, only_messages=True)
    return [] if finding is None else [finding]


def _not_compared(reports: Sequence[RankReport]) -> str:
    """Warn about ranks whose collectives could not be compared."""
    lost = [record.rank for record in _records(reports) if not record.is_whole]
    if not lost:
        return ""
    supervisor = "the sanitizer's log" if any(r.issued for r in reports) else "torch's recorder"
    return f"the collectives of {list_of(lost)} were not compared: there are more than {supervisor} keeps"


def _mismatch(reports: Sequence[RankReport], expected: Expected, unless_raised: bool = False) -> Finding | None:
    """The first collective in which ranks disagree, unless the test allows that. See `first_mismatch`."""
    if expected.faults is not None and not expected.may_differ:
        return _mismatch_of_survivors(reports)
    records = [] if expected.may_differ else _records(reports)
    # Ranks that have issued nothing cannot disagree.
    if not any(record.calls or record.messages for record in records):
        return None
    return first_mismatch(records, unless_raised)


def _unlike_groups(reports: Sequence[RankReport], expected: Expected) -> Finding | None:
    """The first group for which ranks have given other members, unless the test allows that."""
    recorded = [r.recorder for r in reports if r.recorder is not None]
    return None if expected.is_uneven else first_unlike_lists(recorded)


def _records(reports: Sequence[RankReport]) -> list[RankRecord]:
    """The records of the ranks, from their logs if they were sanitized."""
    logged = [
        replace(r.issued, living=r.recorder.living) if r.recorder is not None else r.issued
        for r in reports
        if r.issued is not None
    ]
    return logged or [r.recorder for r in reports if r.recorder is not None]


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
    return first_abandoned(_records(reports), alone, waiting) if waiting else None


def _lost_a_peer(report: RankReport) -> bool:
    return report.ending is RankEnding.ERROR and report.error.cause.is_of_peers


def _found(reports: Sequence[RankReport], finding: Finding, case: Case) -> Verdict:
    """The verdict where the collectives are at fault."""
    shown = [r for r in reports if r.ending.is_failure and r.ending is not RankEnding.STOPPED]
    is_error = finding.kind in (FindingKind.DEADLOCK, FindingKind.ABANDONED, FindingKind.RECORDER)
    fault = Fault(finding.title, reports, case, finding.ranks, finding, tells_finding=True)
    calls = f"{finding.sentence}\n{finding.calls}"
    return _verdict(TestOutcome.ERROR if is_error else TestOutcome.FAILED, fault, shown, calls, finding)


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
    cause = finding or (_mismatch(reports, expected) if has_fault else _cause(reports, expected))
    if cause is not None and (
        _lost_a_peer(first)
        or _may_follow_from(cause, first)
        or _precedes(cause, first, _mismatch(reports, expected, unless_raised=True))
    ):
        return _found(reports, cause, case)
    passed = [r.rank for r in reports if r.ending is RankEnding.PASSED]
    if first.error.cause is Cause.LOST_PEER and passed and not has_fault:
        lost = [r.rank for r in reports if _lost_a_peer(r)]
        under_way = ended_under_way(_records(reports), passed, lost)
        if under_way is not None:
            return _found(reports, under_way, case)
    others = [r.rank for r in culprits if r is not first and not _lost_a_peer(r) and _failed_alike(r, first)]
    alike = [first.rank, *others]
    if first.error.cause is Cause.OF_ALL and len(culprits) > 1:  # it names the ranks
        title = first.error.title
    elif case.is_script and first.ending is RankEnding.EXITED:
        title = f"{case.name} {describe_exit(first.code)} in {_of_all(alike, len(reports))}"
    else:
        title = f"{_of_all(alike, len(reports))} {_what_happened(first, len(alike))}"
    shown = [r for r in culprits if r is first or not (is_victim(r) or r.error.cause is Cause.OF_ALL)]
    outcome = _OUTCOME_OF.get(first.ending, TestOutcome.CRASHED)
    fault = Fault(title, reports, case, tuple(alike), cause, told_summary=first.summary)
    return _verdict(outcome, fault, shown, cause.text if cause else "", cause)


def _mismatch_of_survivors(reports: Sequence[RankReport]) -> Finding | None:
    """The first collective in which survivors disagree, in groups of which no process has died by a fault."""
    dead = [r.rank for r in reports if r.ending is RankEnding.FAULT]
    begun_again = [r.rank for r in reports if r.rank not in dead and r.faults.ended_in(0)]
    records = _records(reports)
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
            survivors.append(replace(record, calls=calls, messages={}))
    return first_mismatch(survivors, unless_raised=True) if len(survivors) > 1 else None


def _any_backend(key: GroupKey) -> GroupKey:
    return key._replace(backend="")


def _precedes(cause: Finding, failed: RankReport, not_expected: Finding | None) -> bool:
    """Whether a mismatch comes before the error of this rank, which may follow from it.

    The call of the rank is on the line that has raised, or above it in a function through which the error came, and
    the test has not gone on after an error of that call. What an `except` or a `finally` calls is below.
    """
    if cause.kind is not FindingKind.MISMATCH or failed.in_flight is not None:
        return False
    calls = (line.site for line in cause.lines if isinstance(line, Doing) and line.rank == failed.rank)
    site = next(calls, None)
    if site is None:
        return False
    lines = [error.line for error in failed.error.sites if (error.file, error.function) == (site.file, site.function)]
    return site.line in lines or (cause == not_expected and any(site.line < line for line in lines))


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


def _of_all(ranks: Sequence[int], size: int) -> str:
    return f"all {size} ranks" if len(ranks) == size > 1 else f"{list_of(ranks)} of {size}"


def _may_follow_from(cause: Finding, crash: RankReport) -> bool:
    """Whether a failure may be due to this fault. gloo aborts for a mismatch; a freed buffer may end a rank anyhow."""
    is_race = cause.kind in (FindingKind.RACE, FindingKind.UNWAITED)
    has_crashed = crash.ending is RankEnding.KILLED or _NO_SUCH_MEMORY in crash.summary
    return crash.in_flight is None and (crash.code == -signal.SIGABRT or (is_race and has_crashed))


def _timed_out(reports: Sequence[RankReport], running: list[RankReport], case: Case, expected: Expected) -> Verdict:
    seconds = max((r.seconds for r in reports), default=0.0)
    # The signal that asks for stacks may end a wait: a rank that continues only because of it has not passed.
    ranks = [r.rank for r in running]
    state = f"{_of_all(ranks, len(reports))} still running" if running else "the last ranks ended too late"
    suspected = _unlike_groups(reports, expected) or _suspicion(reports, running, expected)
    blamed = _known(reports)[:1] or ([suspected] if suspected is not None else _differences(reports)[:1])
    after = f"timed out after {seconds:.1f} s"
    waited_for, reason = nccl_status.suspects({r.rank: r.nccl for r in reports if r.nccl is not None})
    if waited_for:
        state = f"{reason} {list_of(waited_for)} of {len(reports)}"
    elif silence := _silence(reports, running):
        waited_for, state = silence
    title = f"{blamed[0].title}; {after}" if blamed else f"{after}; {state}"
    failed = [r for r in reports if r.ending.is_failure and r.ending is not RankEnding.STOPPED]
    culprits = blamed[0].ranks if blamed else waited_for or tuple(ranks[:1])
    fault = Fault(title, reports, case, culprits, blamed[0] if blamed else None, tells_finding=True)
    calls = suspected.text if suspected else ""
    return _verdict(TestOutcome.TIMEOUT, fault, failed, calls, suspected, is_blamed=False)


def _silence(reports: Sequence[RankReport], running: list[RankReport]) -> tuple[tuple[int, ...], str] | None:
    """The ranks that were stopped, or did not answer although others did; and what is known of them and the others."""
    stopped = [r.rank for r in reports if r.was_stopped]
    others = [r for r in running if not r.was_stopped]
    # A rank that keeps the GIL still writes its stacks.
    mute = [r for r in others if r.recorder is None]
    if len(mute) == len(others):
        mute = [r for r in mute if not r.stacks.strip()]
    silent = [r.rank for r in mute] if len(mute) < len(others) else []
    ranks = (*stopped, *silent)
    if not ranks:
        return None
    size = len(reports)
    states = []
    if stopped:
        states.append(f"{list_of(stopped)} of {size} {verb_for(stopped, 'was', 'were')} stopped, as by SIGSTOP")
    if silent:
        states.append(f"{list_of(silent)} of {size} gave no answer")
    state = "; ".join(states)
    waits = [calls[0] for calls in waiting_calls(_records(reports)).values()]
    for_these = [wait for wait in waits if set(ranks).intersection(wait.missing)]
    calls = list(dict.fromkeys(wait.name for wait in for_these))
    if len(calls) == 1:
        waiting = [wait.rank for wait in for_these]
        whom = "it" if len(ranks) == 1 else "them"
        state += f"; {list_of(waiting)} {verb_for(waiting, 'is', 'are')} waiting for {whom} in {calls[0]}"
    return ranks, state


def _differences(reports: Sequence[RankReport]) -> list[Finding]:
    """Explain ranks that still ran, if any did, by their collectives."""
    return differences(_records(reports)) if any(r.ending is RankEnding.STOPPED for r in reports) else []


def _suspicion(reports: Sequence[RankReport], running: list[RankReport], expected: Expected) -> Finding | None:
    """Suspect a deadlock of ranks that still ran, over more than one collective of one group."""
    records = _records(reports)
    gone = {r.rank: ended(r) for r in reports if r not in running}
    not_over = {
        rank: [wait for wait in waits if not wait.call.raised] for rank, waits in waiting_calls(records).items()
    }
    waiting = {rank: calls for rank, calls in not_over.items() if calls and rank not in gone}
    found = deadlocked(waiting, gone)
    if found:
        return describe_deadlock(found, gone, suspected=True, records=records)
    return suspected_creation([r.recorder for r in reports if r.recorder is not None])


def _disagree(reports: Sequence[RankReport], ones: list[RankReport], case: Case) -> Verdict:
    """`ones` skipped, or had to be ended while they were running; the others did not."""
    others = [r.rank for r in reports if r not in ones]
    verb, opposite = ("skipped", "did not") if ones[0].ending is RankEnding.SKIPPED else ("did not end", "did")
    besides = f", {list_of(others)} {opposite}" if others else ""
    ranks = tuple(r.rank for r in ones)
    title = f"{list_of(ranks)} {verb}{besides}"
    return _verdict(TestOutcome.FAILED, Fault(title, reports, case, ranks), [])


def _what_happened(report: RankReport, ranks: int) -> str:
    """Describe the end of a rank, or of that many ranks that ended alike, as a predicate."""
    was = "was" if ranks == 1 else "were"
    if report.ending is RankEnding.KILLED:
        return f"{was} {describe_exit(report.code, as_participle=True)}"
    if report.ending is RankEnding.EXITED:
        return f"{describe_exit(report.code)} before the test finished"
    if report.ending is RankEnding.LOST:
        return f"{was} lost: {report.summary}"
    if (fault := uncaught(report)) is not None:
        return f"did not catch {report.error.type_name}, which the fault raised {fault.place}"
    if report.ending is RankEnding.FAILED:
        return f"failed: {without_cpp_place(report.summary)}"
    return f"raised {without_cpp_place(report.summary)}"


def _verdict(
    outcome: TestOutcome,
    fault: Fault,
    shown: Sequence[RankReport],
    calls: str = "",
    explained: Finding | None = None,
    is_blamed: bool = True,
) -> Verdict:
    """The verdict on a failure. `calls`: those of the finding that is `explained`.

    `is_blamed`: its table begins with the culprit.
    """
    fault = _after_faults(fault)
    first = next(iter(fault.culprits), None)
    account = _compose(fault, shown, first if is_blamed else None, calls)
    # Neither a file nor pytest-xdist takes the characters that stand for bytes of names that are not UTF-8.
    account = account.encode(errors="backslashreplace").decode()
    view = view_of(fault, account, explained)
    return Verdict(outcome, culprit=first, failure=view, kept_as=fault.case.kept_as)


def _compose(fault: Fault, shown: Sequence[RankReport], first: int | None, calls: str) -> str:
    """The account: title; a line per rank, the culprit first; the calls of ranks that disagree; where running ranks
    were; tracebacks; output; stacks; command."""
    reports, case = fault.reports, fault.case
    in_order = sorted(reports, key=lambda r: (r.rank != first, r.rank))
    seconds = max((r.seconds for r in reports), default=0.0)
    others = [finding.sentence for finding in other_findings(fault)]
    are_running = any(r.ending is RankEnding.STOPPED for r in reports)
    # The output of the culprits helps; without any, as in a hang, that of all that did not pass.
    with_output = shown or [r for r in reports if r.ending is not RankEnding.PASSED]
    parts = [
        f"{fault.title}\n({case.name}, {seconds:.1f} s after its start)",
        "\n".join(f"  {line}" for line in _table(in_order, first)),
        calls,
        "\n".join(["the sanitizer found:", *(f"  {sentence}" for sentence in few(others))]) if others else "",
        hang.explain_hang(reports, case.file, () if calls else _differences(reports)) if are_running else "",
        _nccl(reports),
        *_once(
            "traceback", shown, lambda r: r.traceback.rstrip(), lambda r: r.place_of_failure, "failed in the same way"
        ),
        *_once("last lines of output", with_output, _output_of, None, "printed the same"),
        *(f"rank {r.rank} left running (now terminated): {'; '.join(r.leftovers)}" for r in reports if r.leftovers),
        *_once(
            "stacks, most recent call first",
            reports,
            lambda r: r.stacks.rstrip(),
            lambda r: hang.frames_of(r.stacks),
            "wait in the same place",
        ),
        case.note,
        f"To run it alone:\n  {case.rerun_command}" if case.rerun_command else "",
    ]
    return "\n\n".join(filter(None, parts))


def _nccl(reports: Sequence[RankReport]) -> str:
    """The part of an account that shows NCCL's status of the ranks; "" without one."""
    lines = []
    for report in reports:
        if report.nccl is not None:
            calls = [f"{count(number, 'collective')} in {name}" for name, number in report.nccl.calls.items()]
            lines.append(f"  rank {report.rank}: {', '.join(filter(None, [report.nccl.trouble, *calls]))}")
    return "\n".join(["NCCL's own status (RAS):", *few(lines)]) if lines else ""


def _table(reports: Sequence[RankReport], first: int | None) -> list[str]:
    """A line for each rank; ranks that failed in the same way by themselves share one."""

    def key(report: RankReport) -> object:
        if report.ending not in (RankEnding.FAILED, RankEnding.ERROR) or _follows(report, first):
            is_alike = len(reports) > MOST_LINES
            return without_accidents(_line(report, first)) if is_alike else report.rank
        texts = (without_own_number(text, report.rank) for text in (report.summary, report.traceback))
        return report.ending, report.code, *texts

    return few([_common_line(alike, first) for alike in group_by(reports, key)])


def _common_line(alike: Sequence[RankReport], first: int | None) -> str:
    report, ranks = alike[0], list_of([r.rank for r in alike])
    if len(alike) == 1 or report.ending not in (RankEnding.FAILED, RankEnding.ERROR) or _follows(report, first):
        return f"{ranks}: {_line(report, first)}"
    return f"{ranks} failed in the same way {_after(alike)}: {report.why_failed}"


def _after(reports: Sequence[RankReport]) -> str:
    shortest, longest = (f"{choose(r.seconds for r in reports):.2f}" for choose in (min, max))
    return f"after {shortest} s" if shortest == longest else f"after {shortest} to {longest} s"


def _once(
    what: str,
    reports: Sequence[RankReport],
    text_of: Callable[[RankReport], str],
    place_of: Callable[[RankReport], object] | None,
    verb: str,
) -> list[str]:
    """The texts of ranks, each with a heading; of those that are alike, by their place if they have one, the first."""

    def key(report: RankReport) -> object:
        place = place_of(report) if place_of is not None else None
        return place or without_own_number(text_of(report), report.rank)

    found = []
    for first, *others in group_by([r for r in reports if text_of(r)], key):
        alike = f"{list_of([first.rank, *(r.rank for r in others)])} {verb}; " if others else ""
        found.append(f"{alike}rank {first.rank}'s {what}:\n{text_of(first)}")
    return found


def _line(report: RankReport, first: int | None) -> str:
    return report.line() + (f" (lost its peer because of rank {first})" if _follows(report, first) else "")


def _follows(report: RankReport, first: int | None) -> bool:
    return first is not None and report.rank != first and is_victim(report)


def _output_of(report: RankReport) -> str:
    return cut_middle(warnings_once(report.output), LONGEST_OUTPUT)


def _code(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"exit code {code}" + (f" ({signal_name(-code)})" if code < 0 else "")
