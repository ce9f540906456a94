"""The verdict on a failure, with the whole account of it as a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._collectives.findings.uneven_calls import differences
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._process.same_texts import warnings_once, without_accidents, without_own_number
from torch_testing_ext._process.words import MOST_LINES, count, few, group_by, grouped, list_of
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch import hang
from torch_testing_ext.launch.accounts import RankEnding
from torch_testing_ext.launch.failure_rows import JudgedFailure
from torch_testing_ext.launch.failure_views import other_findings, view_of
from torch_testing_ext.launch.rank_reports import RankReport, is_victim, records_of
from torch_testing_ext.launch.verdict import Verdict

LONGEST_OUTPUT = 6_000
_LONGEST_OF_THREAD = 160
# A rank may have left out its call since its thread has died.
_MAY_LACK_A_CALL = (FindingKind.MISMATCH, FindingKind.DEADLOCK, FindingKind.ABANDONED, FindingKind.BEHIND)


def _after_faults(failure: JudgedFailure) -> JudgedFailure:
    """The failure with the faults of the test in its title that have happened before."""
    happened = [
        f"rank {r.rank} {each}" for r in failure.reports for each in r.faults.happened if each is not r.uncaught_fault
    ]
    untold = [text for text in happened if text not in failure.title]
    return replace(failure, title=f"after {' and '.join(untold)}: {failure.title}") if untold else failure


def _after_dead_threads(failure: JudgedFailure) -> JudgedFailure:
    """The failure of ranks that wait, or disagree, with the threads in its title that have died in one of them."""
    finding = failure.finding
    suspects = {r.rank for r in failure.reports}
    if finding is not None:
        if finding.kind not in _MAY_LACK_A_CALL:
            return failure
        doings = [line for line in finding.lines if isinstance(line, Doing)]
        suspects = {*finding.ranks, *(rank for line in doings for rank in (line.rank, *line.awaited))}
    dead = grouped(
        (thread, r.rank)
        for r in failure.reports
        if r.rank in suspects and r.recorder is not None
        for thread in r.recorder.dead_threads
    )
    if not dead:
        return failure
    (name, error), ranks = next(iter(dead.items()))
    more = f" (and {len(dead) - 1} more)" if len(dead) > 1 else ""
    title = f"after thread {name} of {list_of(ranks)} raised {cut_middle(error, _LONGEST_OF_THREAD)}{more}"
    others = [rank for rank in failure.culprits if rank not in ranks]
    return replace(failure, title=f"{title}: {failure.title}", culprits=(*ranks, *others))


def of_all(ranks: Sequence[int], size: int) -> str:
    return f"all {size} ranks" if len(ranks) == size > 1 else f"{list_of(ranks)} of {size}"


def differences_of(reports: Sequence[RankReport]) -> list[Finding]:
    """Explain ranks that still ran, if any did, by their collectives."""
    return differences(records_of(reports)) if any(r.ending is RankEnding.STOPPED for r in reports) else []


def verdict_on(
    outcome: TestOutcome,
    failure: JudgedFailure,
    shown: Sequence[RankReport],
    calls: str = "",
    explained: Finding | None = None,
    is_blamed: bool = True,
) -> Verdict:
    """The verdict on a failure. `calls`: those of the finding that is `explained`.

    `is_blamed`: its table begins with the culprit.
    """
    if outcome is TestOutcome.TIMEOUT or (failure.finding is not None and failure.tells_finding):
        failure = _after_dead_threads(failure)
    failure = _after_faults(failure)
    first = next(iter(failure.culprits), None)
    account = _compose(failure, shown, first if is_blamed else None, calls)
    # Neither a file nor pytest-xdist takes the characters that stand for bytes of names that are not UTF-8.
    account = account.encode(errors="backslashreplace").decode()
    view = view_of(failure, account, explained)
    return Verdict(outcome, culprit=first, failure=view, kept_as=failure.case.kept_as)


def _compose(failure: JudgedFailure, shown: Sequence[RankReport], first: int | None, calls: str) -> str:
    """The account: title; a line per rank, the culprit first; the calls of ranks that disagree; where running ranks
    were; tracebacks; output; stacks; command."""
    reports, case = failure.reports, failure.case
    in_order = sorted(reports, key=lambda r: (r.rank != first, r.rank))
    seconds = max((r.seconds for r in reports), default=0.0)
    others = [finding.sentence for finding in other_findings(failure)]
    are_running = any(r.ending is RankEnding.STOPPED for r in reports)
    # The output of the culprits helps; without any, as in a hang, that of all that did not pass.
    with_output = shown or [r for r in reports if r.ending is not RankEnding.PASSED]
    parts = [
        f"{failure.title}\n({case.name}, {seconds:.1f} s after its start)",
        "\n".join(f"  {line}" for line in _table(in_order, first)),
        calls,
        "\n".join(["the sanitizer found:", *(f"  {sentence}" for sentence in few(others))]) if others else "",
        hang.explain_hang(reports, case.file, () if calls else differences_of(reports)) if are_running else "",
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
