"""Judges a test: one outcome and one message from how every rank ended. Pure: no process, no file, no clock."""

from __future__ import annotations

import signal
from collections.abc import Sequence
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
from torch_testing_ext._collectives.records import RankRecord, all_agree, list_of, read_record
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._process.reaping import describe_exit, signal_name

from . import folding, hang
from .accounts import RankEnding
from .causes import Cause
from .rank_report import RankReport
from .verdict import Case, Expected, Outcome, Verdict, ended, is_victim

LONGEST_OUTPUT = 6_000
# Of several findings, the first of these decides.
_GRAVITY = list(FindingKind)[::-1].index


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
    if finding is not None:
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
        return _wrong_code(reports, expected.code, case)
    mismatch = _mismatch(reports, expected, unless_raised=True)
    if mismatch is not None:
        return _found(reports, mismatch, case)
    return _found_by_sanitizer(reports, case, expected)


def _found_by_sanitizer(reports: Sequence[RankReport], case: Case, expected: Expected) -> Verdict:
    """Judge ranks that passed with matching collectives: sanitizer findings and unmatched calls."""
    found = sorted((one for r in reports for one in r.found if not one.is_hazard), key=lambda one: _GRAVITY(one.kind))
    if not found and not expected.may_differ and any(r.issued for r in reports):
        unmatched = first_unmatched(_records(reports))
        found = [unmatched] if unmatched is not None else []
    if found:
        return _found(reports, found[0], case)
    hazards = [one for r in reports for one in r.found]
    uneven = None if expected.may_differ or any(r.issued for r in reports) else first_uneven(_records(reports))
    hazards += [uneven] if uneven is not None else []
    said = [f"{one.sentence}\n{one.calls}" for one in hazards]
    not_compared = "" if expected.may_differ else _not_compared(reports)
    return Verdict(Outcome.PASSED, "\n".join([*([not_compared] if not_compared else []), *said]))


def _not_compared(reports: Sequence[RankReport]) -> str:
    """Warn about ranks whose collectives could not be compared."""
    lost = [record.rank for record in _records(reports) if not record.is_whole]
    keeper = "the sanitizer's log" if any(r.issued for r in reports) else "torch's recorder"
    return (
        f"the collectives of {list_of(lost)} were not compared with those of others: more than {keeper} keeps"
        if lost
        else ""
    )


def _mismatch(reports: Sequence[RankReport], expected: Expected, unless_raised: bool = False) -> Finding | None:
    """The first collective in which ranks disagree, unless the test allows that. See `first_mismatch`."""
    if expected.may_differ or (not any(r.issued for r in reports) and all_agree([r.recorder for r in reports])):
        return None
    return first_mismatch(_records(reports), unless_raised)


def _records(reports: Sequence[RankReport]) -> list[RankRecord]:
    """The records of the ranks, from their logs if they were sanitized."""
    texts = {r.rank: r.issued for r in reports if r.issued} or {r.rank: r.recorder for r in reports}
    return [record for rank, text in texts.items() if (record := read_record(rank, text)) is not None]


def _cause(reports: Sequence[RankReport], expected: Expected) -> Finding | None:
    """The fault in the collectives that may explain failures."""
    return _mismatch(reports, expected) or _left_alone(reports)


def _left_alone(reports: Sequence[RankReport]) -> Finding | None:
    waiting = [r.rank for r in reports if _lost_a_peer(r) or r.ending is RankEnding.STOPPED]
    alone = {r.rank: ended(r) for r in reports if r.rank not in waiting}
    return first_left_alone(_records(reports), alone, waiting) if waiting else None


def _lost_a_peer(report: RankReport) -> bool:
    return report.ending is RankEnding.ERROR and report.cause.is_of_peers


def _found(reports: Sequence[RankReport], finding: Finding, case: Case) -> Verdict:
    """The verdict where the collectives are at fault."""
    seconds = max((r.seconds for r in reports), default=0.0)
    title = f"{case.name}, {seconds:.1f} s after its start: {finding.sentence}"
    shown = [r for r in reports if r.ending.is_failure and r.ending is not RankEnding.STOPPED]
    is_error = finding.kind in (FindingKind.DEADLOCK, FindingKind.LEFT_ALONE, FindingKind.RECORDER)
    outcome = Outcome.ERROR if is_error else Outcome.FAILED
    calls = f"the calls of the ranks:\n{finding.calls}"
    message = _compose(title, reports, shown, case, finding.ranks[0], calls)
    return Verdict(outcome, message, finding.ranks[0])


def _failed(reports: Sequence[RankReport], deciding: list[RankReport], case: Case, expected: Expected) -> Verdict:
    culprits = sorted(deciding, key=lambda r: (_lost_a_peer(r), r.ended, r.rank))
    first = culprits[0]
    cause = _cause(reports, expected)
    if cause is not None and (_lost_a_peer(first) or first.code == -signal.SIGABRT):
        return _found(reports, cause, case)
    title = f"rank {first.rank} of {len(reports)} {_what_happened(first, case)}"
    shown = [r for r in culprits if r is first or not is_victim(r)]
    outcome = {
        RankEnding.FAILED: Outcome.FAILED,
        RankEnding.ERROR: Outcome.ERROR,
        RankEnding.LOST: Outcome.ERROR,
    }.get(first.ending, Outcome.CRASHED)
    return Verdict(outcome, _compose(title, reports, shown, case, first.rank, cause.text if cause else ""), first.rank)


def _timed_out(reports: Sequence[RankReport], running: list[RankReport], case: Case, expected: Expected) -> Verdict:
    seconds = max((r.seconds for r in reports), default=0.0)
    # The signal that asks for stacks may end a wait: a rank that continues only because of it has not passed.
    state = f"{_ranks(running)} of {len(reports)} still running" if running else "the last ranks ended only then"
    suspected = _suspicion(reports, running, expected)
    blamed = [suspected] if suspected is not None else _differences(reports)[:1]
    title = f"{case.name} timed out after {seconds:.1f} s; {': '.join([state, *(one.sentence for one in blamed)])}"
    failed = [r for r in reports if r.ending.is_failure and r.ending is not RankEnding.STOPPED]
    message = _compose(title, reports, failed, case, None, suspected.text if suspected else "")
    culprits = [*(rank for one in blamed for rank in one.ranks), *(r.rank for r in running)]
    return Verdict(Outcome.TIMEOUT, message, next(iter(culprits), None))


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
    return suspected_creation([one for r in reports if (one := read_record(r.rank, r.recorder)) is not None])


def _wrong_code(reports: Sequence[RankReport], code: int, case: Case) -> Verdict:
    title = f"rank 0 of {len(reports)} should have ended with {_code(code)}, but ended with {_code(reports[0].code)}"
    return Verdict(Outcome.FAILED, _compose(title, reports, [reports[0]], case, 0), 0)


def _disagree(reports: Sequence[RankReport], ones: list[RankReport], case: Case) -> Verdict:
    """`ones` skipped, or had to be ended while they were running; the others did not."""
    others = [r for r in reports if r not in ones]
    verb = "skipped" if ones[0].ending is RankEnding.SKIPPED else "had to be ended"
    besides = f", {_ranks(others)} did not" if others else ""
    title = f"ranks disagree in {case.name}: {_ranks(ones)} {verb}{besides}"
    message = _compose(title, reports, [], case, ones[0].rank)
    return Verdict(Outcome.FAILED, message, ones[0].rank)


def _what_happened(report: RankReport, case: Case) -> str:
    into = f"{report.seconds:.1f} s into {case.name}"
    if report.ending is RankEnding.KILLED:
        return describe_exit(report.code, f" {into}")
    if report.ending is RankEnding.EXITED:
        return f"{describe_exit(report.code, f' {into}')}, before the test finished"
    if report.ending is RankEnding.LOST:
        return f"was lost {into}: {report.summary}"
    verb = "failed" if report.ending is RankEnding.FAILED else "raised"
    return f"{verb} {into}: {report.summary}"


def _compose(
    title: str,
    reports: Sequence[RankReport],
    shown: Sequence[RankReport],
    case: Case,
    first: int | None,
    collectives: str = "",
) -> str:
    """The message: title; a line per rank, the culprit first; the calls of ranks that disagree; where running ranks
    were; tracebacks; output; command."""
    in_order = sorted(reports, key=lambda r: (r.rank != first, r.rank))
    parts = [title, "\n".join(f"  {line}" for line in _table(in_order, first))]
    parts += [collectives] if collectives else []
    others = [one.sentence for r in reports for one in r.found if one.sentence not in title]
    parts += ["\n".join(["the sanitizer has found:", *(f"  {sentence}" for sentence in others)])] if others else []
    if any(r.ending is RankEnding.STOPPED for r in reports):
        parts.append(hang.explain(reports, case.file, () if collectives else _differences(reports)))
    parts += _once("traceback", [(r.rank, r.traceback.rstrip()) for r in shown if r.traceback], "failed")
    outputs = [
        (r.rank, cut_middle(r.output, LONGEST_OUTPUT)) for r in _with_relevant_output(reports, shown) if r.output
    ]
    parts += _once("last lines of output", outputs, "printed")
    parts += [_leftovers(r) for r in reports if r.leftovers]
    parts += [_stacks(r) for r in reports if r.stacks]
    parts += [case.note] if case.note else []
    if case.rerun_command:
        parts.append(f"To run it alone:\n  {case.rerun_command}")
    return "\n\n".join(parts)


def _table(reports: Sequence[RankReport], first: int | None) -> list[str]:
    """A line for each rank; ranks that failed alike by themselves share one."""

    def key(report: RankReport) -> object:
        if report.ending not in (RankEnding.FAILED, RankEnding.ERROR) or _follows(report, first):
            return report.rank
        texts = (folding.without_own_number(text, report.rank) for text in (report.summary, report.traceback))
        return report.ending, report.code, *texts

    return [_common_line(alike, first) for alike in folding.groups(reports, key)]


def _common_line(alike: Sequence[RankReport], first: int | None) -> str:
    line = _line(alike[0], first)
    if len(alike) == 1:
        return f"rank {alike[0].rank}: {line}"
    _, _, why = line.partition(": ")
    return f"{folding.numbers([r.rank for r in alike])} failed alike {_after(alike)}: {why}"


def _after(reports: Sequence[RankReport]) -> str:
    shortest, longest = (f"{choose(r.seconds for r in reports):.2f}" for choose in (min, max))
    return f"after {shortest} s" if shortest == longest else f"after {shortest} to {longest} s"


def _once(what: str, texts: Sequence[tuple[int, str]], verb: str) -> list[str]:
    """The texts of ranks, each with a heading; of texts that are alike, the first."""
    found = []
    for alike in folding.groups(texts, lambda one: folding.without_own_number(one[1], one[0])):
        (rank, text), *others = alike
        all_of_them = f"{folding.numbers([number for number, _ in alike])} {verb} alike; " if others else ""
        found.append(f"{all_of_them}rank {rank}'s {what}:\n{text}")
    return found


def _line(report: RankReport, first: int | None) -> str:
    return report.line() + (f" (lost its peer: follows from rank {first})" if _follows(report, first) else "")


def _follows(report: RankReport, first: int | None) -> bool:
    """Is this rank a victim of the first?"""
    return first is not None and report.rank != first and is_victim(report)


def _with_relevant_output(reports: Sequence[RankReport], shown: Sequence[RankReport]) -> list[RankReport]:
    """The ranks whose output helps: the culprits; without any, as in a hang, all that did not pass."""
    return list(shown) if shown else [r for r in reports if r.ending is not RankEnding.PASSED]


def _leftovers(report: RankReport) -> str:
    return f"rank {report.rank} left running (now terminated): {'; '.join(report.leftovers)}"


def _stacks(report: RankReport) -> str:
    return f"rank {report.rank}'s stacks, most recent call first:\n{report.stacks.rstrip()}"


def _ranks(reports: Sequence[RankReport]) -> str:
    numbers = [str(r.rank) for r in reports]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


def _code(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"exit code {code}" + (f" ({signal_name(-code)})" if code < 0 else "")
