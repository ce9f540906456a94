"""The verdict on ranks that were still running when the time was over."""

from __future__ import annotations

from collections.abc import Sequence

from torch_testing_ext._collectives.findings.deadlocks import deadlocked, describe_deadlock, waiting_calls
from torch_testing_ext._collectives.findings.finding import Finding
from torch_testing_ext._collectives.proof.store_waits import suspected_creation
from torch_testing_ext._process.words import list_of, verb_for
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch import nccl_status
from torch_testing_ext.launch.accounts import RankEnding
from torch_testing_ext.launch.failure_rows import JudgedFailure
from torch_testing_ext.launch.failure_verdicts import differences_of, of_all, verdict_on
from torch_testing_ext.launch.rank_reports import RankReport, ended, records_of
from torch_testing_ext.launch.verdict import Case, Verdict


def judge_time_out(
    reports: Sequence[RankReport],
    running: list[RankReport],
    case: Case,
    unlike: Finding | None,
    known: Sequence[Finding],
) -> Verdict:
    """The verdict on ranks that still ran. `unlike`: a group of which they have named other members."""
    seconds = max((r.seconds for r in reports), default=0.0)
    # The signal that asks for stacks may end a wait: a rank that continues only because of it has not passed.
    ranks = [r.rank for r in running]
    state = f"{of_all(ranks, len(reports))} still running" if running else "the last ranks ended too late"
    suspected = unlike or _suspicion(reports, running)
    blamed = known[:1] or ([suspected] if suspected is not None else differences_of(reports)[:1])
    after = f"timed out after {seconds:.1f} s"
    waited_for, reason = nccl_status.suspects({r.rank: r.nccl for r in reports if r.nccl is not None})
    if waited_for:
        state = f"{reason} {list_of(waited_for)} of {len(reports)}"
    elif silence := _silence(reports, running):
        waited_for, state = silence
    title = f"{blamed[0].title}; {after}" if blamed else f"{after}; {state}"
    failed = [r for r in reports if r.ending.is_failure and r.ending is not RankEnding.STOPPED]
    culprits = blamed[0].ranks if blamed else waited_for or tuple(ranks[:1])
    failure = JudgedFailure(title, reports, case, culprits, blamed[0] if blamed else None, tells_finding=True)
    calls = suspected.text if suspected else ""
    return verdict_on(TestOutcome.TIMEOUT, failure, failed, calls, suspected, is_blamed=False)


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
    waits = [calls[0] for calls in waiting_calls(records_of(reports)).values()]
    for_these = [wait for wait in waits if set(ranks).intersection(wait.missing)]
    calls = list(dict.fromkeys(wait.name for wait in for_these))
    if len(calls) == 1:
        waiting = [wait.rank for wait in for_these]
        whom = "it" if len(ranks) == 1 else "them"
        state += f"; {list_of(waiting)} {verb_for(waiting, 'is', 'are')} waiting for {whom} in {calls[0]}"
    return ranks, state


def _suspicion(reports: Sequence[RankReport], running: list[RankReport]) -> Finding | None:
    """Suspect a deadlock of ranks that still ran, over more than one collective of one group."""
    records = records_of(reports)
    gone = {r.rank: ended(r) for r in reports if r not in running}
    not_over = {
        rank: [wait for wait in waits if not wait.call.raised] for rank, waits in waiting_calls(records).items()
    }
    waiting = {rank: calls for rank, calls in not_over.items() if calls and rank not in gone}
    found = deadlocked(waiting, gone)
    if found:
        return describe_deadlock(found, gone, suspected=True, records=records)
    return suspected_creation([r.recorder for r in reports if r.recorder is not None])
