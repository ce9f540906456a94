"""Judges a test: one outcome and one message from how every rank ended. Pure: no process, no file, no clock."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch_testing_ext._collectives.creation import suspected_creation
from torch_testing_ext._collectives.findings import (
    Finding,
    FindingKind,
    deadlocked,
    describe_deadlock,
    differences,
    first_left_alone,
    first_mismatch,
    first_uneven,
    first_unmatched,
    waits,
)
from torch_testing_ext._collectives.records import RankRecord
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._process.reaping import describe_exit, signal_name
from torch_testing_ext._process.words import MOST_LINES, few, list_of

from . import folding, hang, screen
from .accounts import RankEnding
from .causes import Cause
from .rank_report import RankReport, with_exception, without_cpp_place
from .screen import Fault
from .verdict import Case, Expected, Outcome, Verdict, ended, is_victim

LONGEST_OUTPUT = 6_000
_NO_SUCH_MEMORY = os.strerror(errno.EFAULT)  # gloo was to send a buffer that has been freed


def judge(
    reports: Sequence[RankReport],
    timed_out: bool,
    case: Case,
    expected: Expected | None = None,
    finding: Finding | None = None,
) -> Verdict:
    """The verdict on a test, from the reports of all its ranks, and the finding for which they were ended, if any."""
    verdict = _judge(reports, timed_out, case, expected or Expected(), finding)
    in_use = any(report.cause is Cause.PORT_IN_USE for report in reports)
    return replace(verdict, cause=Cause.PORT_IN_USE) if in_use else verdict


def _judge(
    reports: Sequence[RankReport], timed_out: bool, case: Case, expected: Expected, finding: Finding | None
) -> Verdict:
    if interrupted := [r.rank for r in reports if r.in_flight is not None]:
        # A rank that was ended while an exception was in flight has failed by that.
        reports = [r if r.in_flight is None else with_exception(r, r.in_flight) for r in reports]
        return _failed(reports, [r for r in reports if r.rank in interrupted], case, expected, finding)
    if finding is not None:
        if finding.kind is FindingKind.MISMATCH:  # since it was found, other ranks may have come to the same collective
            finding = _mismatch(reports, expected) or finding
        return _found(reports, finding, case)
    running = [r for r in reports if r.ending is RankEnding.STOPPED]
    deciding = [r for r in reports if expected.decides(r) and r not in running]
    if timed_out and (running or not deciding):
        return _timed_out(reports, running, case, expected)
    if deciding:
        return _failed(reports, deciding, case, expected)
    skips = [r for r in reports if r.ending is RankEnding.SKIPPED]
    if len(skips) == len(reports) and not expected.any_code:
        return Verdict(Outcome.SKIPPED, skips[0].summary, code=skips[0].code)
    # If any code is allowed, so is that of a skip; but a rank that had to be ended never makes a pass.
    if running or (skips and not expected.any_code):
        alone = _left_alone(reports)
        return _disagree(reports, skips or running, case) if alone is None else _found(reports, alone, case)
    if expected.code is not None and not expected.any_code and reports[0].code != expected.code:
        title = f"rank 0 of {len(reports)} should have ended with {_code(expected.code)}, but ended with "
        return _verdict(Outcome.FAILED, Fault(title + _code(reports[0].code), reports, case, (0,)), [reports[0]])
    mismatch = _mismatch(reports, expected, unless_raised=True)
    if mismatch is not None:
        return _found(reports, mismatch, case)
    return _found_by_sanitizer(reports, case, expected)


def _found_by_sanitizer(reports: Sequence[RankReport], case: Case, expected: Expected) -> Verdict:
    """Judge ranks that passed with matching collectives: sanitizer findings and unmatched calls."""
    if not expected.may_differ and any(r.issued for r in reports):
        unmatched = first_unmatched(_records(reports))
        if unmatched is None:
            caught = first_unmatched(_records(reports), has_raised=True)
            unmatched = caught if caught is not None and any(map(hang.probably_catches_errors, caught.sites)) else None
        if unmatched is not None:
            reports = [replace(reports[0], found=(*reports[0].found, unmatched)), *reports[1:]]
    found = sorted((one for r in reports for one in r.found if not one.is_hazard), key=lambda one: one.gravity)
    if found:
        return _found(reports, found[0], case)
    hazards = [one for r in reports for one in r.found]
    uneven = None if expected.may_differ or any(r.issued for r in reports) else first_uneven(_records(reports))
    # The recorder does not know that a wait has raised as the test expects.
    hazards += [uneven] if uneven is not None and not any(map(hang.probably_waits_with_timeout, uneven.sites)) else []
    not_compared = "" if expected.may_differ else _not_compared(reports)
    remarks = [not_compared, *(f"{one.sentence}\n{one.calls}" for one in hazards)]
    return Verdict(Outcome.PASSED, "\n".join(filter(None, remarks)))


def _not_compared(reports: Sequence[RankReport]) -> str:
    """Warn about ranks whose collectives could not be compared."""
    lost = [record.rank for record in _records(reports) if not record.is_whole]
    if not lost:
        return ""
    keeper = "the sanitizer's log" if any(r.issued for r in reports) else "torch's recorder"
    return f"the collectives of {list_of(lost)} were not compared with those of others: more than {keeper} keeps"


def _mismatch(reports: Sequence[RankReport], expected: Expected, unless_raised: bool = False) -> Finding | None:
    """The first collective in which ranks disagree, unless the test allows that. See `first_mismatch`."""
    return None if expected.may_differ else first_mismatch(_records(reports), unless_raised)


def _records(reports: Sequence[RankReport]) -> list[RankRecord]:
    """The records of the ranks, from their logs if they were sanitized."""
    logged = [r.issued for r in reports if r.issued is not None]
    return logged or [r.recorder for r in reports if r.recorder is not None]


def _cause(reports: Sequence[RankReport], expected: Expected) -> Finding | None:
    """The fault in the collectives that may explain failures."""
    known = {one.kind: one for one in reversed(_known(reports))}
    mismatch = _mismatch(reports, expected)
    return mismatch or known.get(FindingKind.RACE) or _left_alone(reports) or known.get(FindingKind.UNWAITED)


def _known(reports: Sequence[RankReport]) -> list[Finding]:
    """The findings of ranks that explain hangs and crashes, the gravest first."""
    found = (one for r in reports for one in r.found if one.kind in (FindingKind.RACE, FindingKind.UNWAITED))
    return sorted(found, key=lambda one: one.gravity)


def _left_alone(reports: Sequence[RankReport]) -> Finding | None:
    waiting = [r.rank for r in reports if _lost_a_peer(r) or r.ending is RankEnding.STOPPED]
    alone = {r.rank: ended(r) for r in reports if r.rank not in waiting}
    return first_left_alone(_records(reports), alone, waiting) if waiting else None


def _lost_a_peer(report: RankReport) -> bool:
    return report.ending is RankEnding.ERROR and report.cause.is_of_peers


def _found(reports: Sequence[RankReport], finding: Finding, case: Case) -> Verdict:
    """The verdict where the collectives are at fault."""
    shown = [r for r in reports if r.ending.is_failure and r.ending is not RankEnding.STOPPED]
    is_error = finding.kind in (FindingKind.DEADLOCK, FindingKind.LEFT_ALONE, FindingKind.RECORDER)
    fault = Fault(finding.title, reports, case, finding.ranks, finding)
    calls = f"{finding.sentence}\n{finding.calls}"
    return _verdict(Outcome.ERROR if is_error else Outcome.FAILED, fault, shown, calls, finding)


def _failed(
    reports: Sequence[RankReport],
    deciding: list[RankReport],
    case: Case,
    expected: Expected,
    finding: Finding | None = None,
) -> Verdict:
    culprits = sorted(deciding, key=lambda r: (_lost_a_peer(r), r.ended, r.rank))
    first = culprits[0]
    cause = finding or _cause(reports, expected)
    if cause is not None and (_lost_a_peer(first) or _may_follow_from(cause, first)):
        return _found(reports, cause, case)
    others = [r.rank for r in culprits if r is not first and not _lost_a_peer(r) and _failed_alike(r, first)]
    alike = [first.rank, *others]
    if first.cause is Cause.OF_ALL and len(culprits) > 1:  # it names the ranks
        title = first.summary.partition(": ")[2]
    else:
        title = f"{_of_all(alike, len(reports))} {_what_happened(first)}"
    shown = [r for r in culprits if r is first or not (is_victim(r) or r.cause is Cause.OF_ALL)]
    errors = {RankEnding.FAILED: Outcome.FAILED, RankEnding.ERROR: Outcome.ERROR, RankEnding.LOST: Outcome.ERROR}
    outcome = errors.get(first.ending, Outcome.CRASHED)
    fault = Fault(title, reports, case, tuple(alike), cause)
    return _verdict(outcome, fault, shown, cause.text if cause else "", cause)


def _failed_alike(one: RankReport, other: RankReport) -> bool:
    """Have two ranks failed at the same place in the same way, whatever the values?"""
    if one is other:
        return True
    if one.ending is not other.ending or one.code != other.code:
        return False
    if one.ending in (RankEnding.FAILED, RankEnding.ERROR):
        place = one.place_of_failure
        return one.summary == other.summary if place is None else place == other.place_of_failure
    return folding.without_accidents(one.summary) == folding.without_accidents(other.summary)


def _of_all(ranks: Sequence[int], size: int) -> str:
    return f"all {size} ranks" if len(ranks) == size > 1 else f"{list_of(ranks)} of {size}"


def _may_follow_from(cause: Finding, crash: RankReport) -> bool:
    """May a failure be due to this fault? gloo aborts for a mismatch; a buffer that is freed may end a rank anyhow."""
    is_race = cause.kind in (FindingKind.RACE, FindingKind.UNWAITED)
    has_crashed = crash.ending is RankEnding.KILLED or _NO_SUCH_MEMORY in crash.summary
    return crash.in_flight is None and (crash.code == -signal.SIGABRT or (is_race and has_crashed))


def _timed_out(reports: Sequence[RankReport], running: list[RankReport], case: Case, expected: Expected) -> Verdict:
    seconds = max((r.seconds for r in reports), default=0.0)
    # The signal that asks for stacks may end a wait: a rank that continues only because of it has not passed.
    ranks = [r.rank for r in running]
    state = f"{_of_all(ranks, len(reports))} still running" if running else "the last ranks ended only then"
    suspected = _suspicion(reports, running, expected)
    blamed = _known(reports)[:1] or ([suspected] if suspected is not None else _differences(reports)[:1])
    after = f"timed out after {seconds:.1f} s"
    title = f"{blamed[0].title}; {after}" if blamed else f"{after}; {state}"
    failed = [r for r in reports if r.ending.is_failure and r.ending is not RankEnding.STOPPED]
    culprits = blamed[0].ranks if blamed else tuple(ranks[:1])
    fault = Fault(title, reports, case, culprits, blamed[0] if blamed else None)
    calls = suspected.text if suspected else ""
    return _verdict(Outcome.TIMEOUT, fault, failed, calls, suspected, is_blamed=False)


def _differences(reports: Sequence[RankReport]) -> list[Finding]:
    """Explain ranks that still ran, if any did, by their collectives."""
    return differences(_records(reports)) if any(r.ending is RankEnding.STOPPED for r in reports) else []


def _suspicion(reports: Sequence[RankReport], running: list[RankReport], expected: Expected) -> Finding | None:
    """Suspect a deadlock of ranks that still ran, over more than one collective of one group."""
    records = _records(reports)
    gone = {r.rank: ended(r) for r in reports if r not in running}
    waiting = {rank: calls for rank, calls in waits(records).items() if rank not in gone}
    found = deadlocked(waiting, gone)
    if found:
        return describe_deadlock(found, gone, suspected=True)
    return suspected_creation([r.recorder for r in reports if r.recorder is not None])


def _disagree(reports: Sequence[RankReport], ones: list[RankReport], case: Case) -> Verdict:
    """`ones` skipped, or had to be ended while they were running; the others did not."""
    others = [r.rank for r in reports if r not in ones]
    verb = "skipped" if ones[0].ending is RankEnding.SKIPPED else "had to be ended"
    besides = f", {list_of(others)} did not" if others else ""
    ranks = tuple(r.rank for r in ones)
    title = f"{list_of(ranks)} {verb}{besides}"
    return _verdict(Outcome.FAILED, Fault(title, reports, case, ranks), [])


def _what_happened(report: RankReport) -> str:
    if report.ending is RankEnding.KILLED:
        return describe_exit(report.code)
    if report.ending is RankEnding.EXITED:
        return f"{describe_exit(report.code)} before the test finished"
    if report.ending is RankEnding.LOST:
        return f"was lost: {report.summary}"
    if report.ending is RankEnding.FAILED:
        return f"failed: {without_cpp_place(report.summary)}"
    return f"raised {without_cpp_place(report.summary)}"


def _verdict(
    outcome: Outcome,
    fault: Fault,
    shown: Sequence[RankReport],
    calls: str = "",
    explained: Finding | None = None,
    is_blamed: bool = True,
) -> Verdict:
    """The verdict on a failure. `calls`: those of the finding that is `explained`.

    `is_blamed`: its table begins with the culprit.
    """
    first = next(iter(fault.culprits), None)
    account = _compose(fault, shown, first if is_blamed else None, calls)
    # Neither a file nor pytest-xdist takes the characters that stand for bytes of names that are not UTF-8.
    account = account.encode(errors="backslashreplace").decode()
    view = screen.view_of(fault, account, explained)
    return Verdict(outcome, culprit=first, failure=view, kept_as=fault.case.kept_as)


def _compose(fault: Fault, shown: Sequence[RankReport], first: int | None, calls: str) -> str:
    """The account: title; a line per rank, the culprit first; the calls of ranks that disagree; where running ranks
    were; tracebacks; output; stacks; command."""
    reports, case = fault.reports, fault.case
    in_order = sorted(reports, key=lambda r: (r.rank != first, r.rank))
    seconds = max((r.seconds for r in reports), default=0.0)
    others = [one.sentence for r in reports for one in r.found if one.sentence not in fault.title]
    are_running = any(r.ending is RankEnding.STOPPED for r in reports)
    # The output of the culprits helps; without any, as in a hang, that of all that did not pass.
    with_output = shown or [r for r in reports if r.ending is not RankEnding.PASSED]
    parts = [
        f"{fault.title}\n({case.name}, {seconds:.1f} s after its start)",
        "\n".join(f"  {line}" for line in _table(in_order, first)),
        calls,
        "\n".join(["the sanitizer has found:", *(f"  {sentence}" for sentence in few(others))]) if others else "",
        hang.explain(reports, case.file, () if calls else _differences(reports)) if are_running else "",
        *_once("traceback", shown, lambda r: r.traceback.rstrip(), lambda r: r.place_of_failure, "failed"),
        *_once("last lines of output", with_output, _output_of, None, "printed"),
        *(f"rank {r.rank} left running (now terminated): {'; '.join(r.leftovers)}" for r in reports if r.leftovers),
        *_once(
            "stacks, most recent call first",
            reports,
            lambda r: r.stacks.rstrip(),
            lambda r: hang.frames_of(r.stacks),
            "wait",
        ),
        case.note,
        f"To run it alone:\n  {case.rerun_command}" if case.rerun_command else "",
    ]
    return "\n\n".join(filter(None, parts))


def _table(reports: Sequence[RankReport], first: int | None) -> list[str]:
    """A line for each rank; ranks that failed alike by themselves share one."""

    def key(report: RankReport) -> object:
        if report.ending not in (RankEnding.FAILED, RankEnding.ERROR) or _follows(report, first):
            is_alike = len(reports) > MOST_LINES
            return folding.without_accidents(_line(report, first)) if is_alike else report.rank
        texts = (folding.without_own_number(text, report.rank) for text in (report.summary, report.traceback))
        return report.ending, report.code, *texts

    return few([_common_line(alike, first) for alike in folding.groups(reports, key)])


def _common_line(alike: Sequence[RankReport], first: int | None) -> str:
    line, ranks = _line(alike[0], first), list_of([r.rank for r in alike])
    if len(alike) == 1 or alike[0].ending not in (RankEnding.FAILED, RankEnding.ERROR) or _follows(alike[0], first):
        return f"{ranks}: {line}"
    _, _, why = line.partition(": ")
    return f"{ranks} failed alike {_after(alike)}: {why}"


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
        return place or folding.without_own_number(text_of(report), report.rank)

    found = []
    for first, *others in folding.groups([r for r in reports if text_of(r)], key):
        alike = f"{list_of([first.rank, *(r.rank for r in others)])} {verb} alike; " if others else ""
        found.append(f"{alike}rank {first.rank}'s {what}:\n{text_of(first)}")
    return found


def _line(report: RankReport, first: int | None) -> str:
    return report.line() + (f" (lost its peer: follows from rank {first})" if _follows(report, first) else "")


def _follows(report: RankReport, first: int | None) -> bool:
    return first is not None and report.rank != first and is_victim(report)


def _output_of(report: RankReport) -> str:
    return cut_middle(folding.warnings_once(report.output), LONGEST_OUTPUT)


def _code(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"exit code {code}" + (f" ({signal_name(-code)})" if code < 0 else "")
