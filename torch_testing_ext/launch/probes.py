"""Finds ranks that disagree or wait for each other while they run: probes and logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch_testing_ext._collectives.findings.deadlocks import deadlocked, waiting_calls
from torch_testing_ext._collectives.findings.diverged_replicas import first_diverged
from torch_testing_ext._collectives.findings.finding import Finding
from torch_testing_ext._collectives.findings.opposite_orders import first_inversion
from torch_testing_ext._collectives.findings.sanitizer_reports import finding_of_rank
from torch_testing_ext._collectives.findings.unbuffered_sends import first_unbuffered
from torch_testing_ext._collectives.proof.proof_of_hang import Evidence, ProofRules, endless_mismatch, judge_probe
from torch_testing_ext._collectives.records.issued_calls import RankRecord
from torch_testing_ext._collectives.records.raw_records import read_raw
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import AGAIN, SanitizeKind
from torch_testing_ext._collectives.sanitizer.sanitizer_log import (
    LogContent,
    LogReader,
    have_notes,
    is_quiet,
    looks_beside,
    looks_of,
    results_beside,
    show_mismatch,
    uses_groups,
)
from torch_testing_ext._process import system
from torch_testing_ext._process.logs import content_of
from torch_testing_ext._process.words import grouped
from torch_testing_ext.launch.fork_server_client import Run
from torch_testing_ext.launch.jobs import Sanitize

from .verdict import RankReport, all_passed

# --------------------------------------------------------------------------------------------------------------------
# The parent's side of the sanitizer: reads the logs of the ranks of a test, while they run and at the end.
#
# Comparing headers costs next to nothing. The logs are read only when the ranks have stopped issuing anything, or
# have issued different things.

INTERVAL = 0.04
# Until then, a call that raises for the mismatch has done so.
LOG_CONFIRMATION = 0.04
# A rank that has made a finding fails. If nobody issues anything for so long after that, the ranks hang because of it.
QUIET_AFTER_NOTE = 1.0
# Members that have yet to come would show which ranks are the exception.
AWAITED_TIMEOUT = 0.5


class Logs:
    """The logs of all ranks of a run, by rank; of a run that is not sanitized, none."""

    def __init__(self, paths: Sequence[Path], sanitize: Sanitize | None):
        self.sanitize = sanitize or Sanitize()
        self._paths = paths
        self._readers = [LogReader(path) for path in paths] if self.sanitize.kinds else []

    def __bool__(self) -> bool:
        return bool(self._readers)

    def remove(self) -> None:
        """Remove the files: nothing more is to be read. A persistent rank would leave one for each of its tests."""
        for reader in self._readers:
            reader.remove()
        if SanitizeKind.REPLICAS in self.sanitize.kinds:
            for path in self._paths:
                looks_beside(path).unlink(missing_ok=True)
        for path in self._paths:
            results_beside(path).unlink(missing_ok=True)

    def events(self, rank: int) -> list[dict[str, Any]]:
        """The events of faults in the log of a rank, and in that of its second process."""
        again = LogReader(self._paths[rank].with_name(self._paths[rank].name + AGAIN))
        contents = [self._readers[rank].read(), again.read()]
        return [event for content in contents if content is not None for event in content.events]

    def headers(self) -> list[bytes]:
        return [reader.header() for reader in self._readers]

    def read(self) -> dict[int, LogContent]:
        contents = {}
        for rank, reader in enumerate(self._readers):
            content = reader.read()
            if content is not None:
                contents[rank] = content
        return contents

    def records(self) -> dict[int, RankRecord]:
        return records_of(self.read())

    def gravest_note(self) -> Finding | None:
        """The gravest finding of a rank so far."""
        findings: list[Finding] = []
        for rank, content in self.read().items():
            findings.extend(_findings_of(rank, content))
        return min(findings, key=lambda finding: finding.gravity, default=None)

    def complete(self, reports: Sequence[RankReport]) -> list[RankReport]:
        """The reports with what the logs show. Ranks that have passed and agree are not looked at closer."""
        have_passed = all_passed(reports)
        headers = self.headers()
        may_be_inverted = SanitizeKind.ORDER in self.sanitize.kinds and uses_groups(headers) > 1
        have_results = any(results_beside(path).exists() for path in self._paths)
        if have_passed and is_quiet(headers) and not may_be_inverted and not have_results:
            return self._with_diverged(reports)
        contents = self.read()
        completed = []
        for report in reports:
            content = contents.get(report.rank)
            if content is not None:
                record = content.record(report.rank)
                report = replace(report, issued=record, found=_findings_of(report.rank, content))
            completed.append(report)
        if have_passed and completed:
            issued = [report.issued for report in completed if report.issued is not None]
            completed[0] = _with_findings(completed[0], *self._of_order(issued))
        return self._with_diverged(self._with_wrong_results(completed) if have_results else completed)

    def _with_wrong_results(self, reports: Sequence[RankReport]) -> list[RankReport]:
        """The reports with the results that are not those of the inputs."""
        from torch_testing_ext._collectives.sanitizer.result_checks import results_of, wrong_results

        records = [report.issued for report in reports if report.issued is not None]
        results = {rank: results_of(path) for rank, path in enumerate(self._paths)}
        found = grouped((finding.ranks[0], finding) for finding in wrong_results(records, results))
        return [_with_findings(report, *found.get(report.rank, ())) for report in reports]

    def _with_diverged(self, reports: Sequence[RankReport]) -> list[RankReport]:
        """The reports with the first tensor that is not alike on all ranks, though it must be."""
        if SanitizeKind.REPLICAS not in self.sanitize.kinds:
            return list(reports)
        looks = {rank: looks_of(path) for rank, path in enumerate(self._paths)}
        diverged = first_diverged(looks)
        if diverged is None:
            return list(reports)
        first = diverged.ranks[0]
        return [_with_findings(report, diverged) if report.rank == first else report for report in reports]

    def _of_order(self, records: Sequence[RankRecord]) -> Iterator[Finding]:
        """The orders of calls that passed only by chance, or since sends are buffered."""
        kinds = self.sanitize.kinds
        inversion = first_inversion(records) if SanitizeKind.ORDER in kinds else None
        fails = SanitizeKind.UNBUFFERED in kinds
        if inversion is not None:
            yield replace(inversion, is_hazard=not self.sanitize.fails_for_order)
        elif fails or SanitizeKind.ORDER in kinds:
            stuck = first_unbuffered(records, with_messages_alone=fails)
            if stuck is not None:
                yield replace(stuck, is_hazard=not (fails or self.sanitize.fails_for_order))


def _findings_of(rank: int, content: LogContent) -> tuple[Finding, ...]:
    return tuple(finding_of_rank(rank, note) for note in content.notes)


def _with_findings(report: RankReport, *findings: Finding) -> RankReport:
    return replace(report, found=(*report.found, *findings))


def records_of(contents: Mapping[int, LogContent]) -> dict[int, RankRecord]:
    return {rank: content.record(rank) for rank, content in contents.items()}


class LiveLogs:
    """Reads the logs again and again while the ranks run.

    A mismatch counts if it is still there at the next step, and nothing has raised for it.
    """

    def __init__(self, logs: Logs, rules: ProofRules, now: float):
        self._logs = logs
        self._rules = rules
        self._before: list[bytes] = []
        self._judged: list[bytes] = []
        self._quiet_since = now
        self._candidate: Finding | None = None
        # When there was a candidate first.
        self._since = 0.0
        self._suspects: frozenset[tuple[int, int]] = frozenset()
        # At the last step: ranks seem to wait for each other, as they did not before.
        self.has_new_suspects = False
        self.due = now + INTERVAL

    def step(self, now: float, pending: Sequence[int], ended: Mapping[int, str]) -> Finding | None:
        """A mismatch, once it is certain, or what a rank has found, once all are quiet. `ended`: how ranks did."""
        self.due = now + INTERVAL
        self.has_new_suspects = False
        headers = self._logs.headers()
        has_stopped = headers == self._before
        self._before = headers
        if not has_stopped:
            self._quiet_since = now
        elif have_notes(headers) and now >= self._quiet_since + QUIET_AFTER_NOTE:
            return self._logs.gravest_note()
        if self._candidate is None and not self._are_worth_reading(headers, has_stopped):
            return None
        self._judged = headers if has_stopped else []
        records = self._logs.records()
        mismatch = self._mismatch(records)
        if mismatch is not None and self._is_certain(mismatch, now, pending):
            return mismatch
        if self._candidate is None:
            self._since = now
        self._candidate = mismatch
        if mismatch is not None:
            self.due = now + LOG_CONFIRMATION
        elif has_stopped:
            self._suspect(records, pending, ended)
        return None

    def _are_worth_reading(self, headers: list[bytes], has_stopped: bool) -> bool:
        if headers == self._judged:
            return False
        return has_stopped or show_mismatch(headers)

    def _mismatch(self, records: Mapping[int, RankRecord]) -> Finding | None:
        latest = [calls[-1] for record in records.values() for calls in record.calls.values()]
        return endless_mismatch(list(records.values()), latest, self._rules)

    def _is_certain(self, mismatch: Finding, now: float, pending: Sequence[int]) -> bool:
        """Was it there at the last step, and has every rank come that would show more?"""
        if self._candidate is None or mismatch.sentence != self._candidate.sentence:
            return False
        is_complete = not set(mismatch.awaited).intersection(pending)
        return is_complete or now > self._since + AWAITED_TIMEOUT

    def _suspect(self, records: Mapping[int, RankRecord], pending: Sequence[int], ended: Mapping[int, str]) -> None:
        all_waiting = waiting_calls(list(records.values()))
        waiting = {rank: calls for rank, calls in all_waiting.items() if rank in pending}
        deadlock = deadlocked(waiting, ended)
        suspects = frozenset((rank, wait.call.order) for rank, wait in deadlock.items())
        self.has_new_suspects = bool(suspects) and suspects != self._suspects
        self._suspects = suspects


# --------------------------------------------------------------------------------------------------------------------
# Finds ranks that disagree or wait for each other while they run: by probes, and in the logs of sanitized ranks.
#
# Ranks that have run for a while without news are asked for their collectives. They write these; nothing waits for
# the answers. A probe costs ranks and parent some milliseconds. While a rank computes, the others may well wait for
# it: then it is seldom asked. Those that are idle meanwhile are asked as often as ever, since two of them may
# disagree.
#
# The states are pure: each says when it is due, and the time is a parameter.

# Between two looks at the CPU time of ranks, which costs much less than to ask them: at least, and at most.
IDLE_INTERVAL = 0.15
LOOK = 1.0
# The system counts CPU time in steps of 0.01 s. Threads that serve connections use a little all the time.
_STEP, _SHARE = 0.015, 0.02
# Seconds without news.
FIRST_PROBE = 1.0
CONFIRMATION = 0.25
GROWTH, LONGEST = 1.6, 20.0
# The factor by which the time until all ranks are asked is longer if one computes.
FACTOR_IF_BUSY = 3.0
# Ranks that may disagree.
_FEWEST = 2
# Ranks answer in milliseconds, unless they hold the GIL or the machine is loaded. While their fork server imports for
# later ranks, none is asked yet: so the time for the last ones begins when one has answered.
FIRST_READ, LONGEST_PAUSE, ANSWER_TIMEOUT = 0.03, 0.25, 1.0
FIRST_ANSWER_TIMEOUT = 10.0


@dataclass(frozen=True)
class Pace:
    """The time until idle ranks are asked and until all are, in seconds, and when all are at the latest."""

    of_idle: float
    of_all: float
    latest: float

    @classmethod
    def first(cls, now: float) -> Pace:
        return cls(FIRST_PROBE, FIRST_PROBE, now + FACTOR_IF_BUSY * FIRST_PROBE)

    def again(self) -> Pace:
        return replace(self, of_idle=FIRST_PROBE, of_all=FIRST_PROBE)

    def slower(self, now: float, were_all_asked: bool) -> Pace:
        """The pace after a probe that has found nothing."""
        of_idle = min(self.of_idle * GROWTH, LONGEST)
        if not were_all_asked:
            return replace(self, of_idle=of_idle)
        of_all = min(self.of_all * GROWTH, LONGEST)
        return Pace(of_idle, of_all, now + FACTOR_IF_BUSY * of_all)

    @property
    def between(self) -> float:
        """The time between two looks at whether ranks are idle."""
        return max(IDLE_INTERVAL, self.of_idle / 4)


@dataclass(frozen=True)
class Waiting:
    """No rank is asked before `asked_at`; then those that are idle, or all at the latest moment of the pace.

    At `due`, it is looked whether they are idle.
    """

    pace: Pace
    due: float
    asked_at: float

    @classmethod
    def begin(cls, pace: Pace, now: float) -> Waiting:
        asked_at = min(now + pace.of_idle, pace.latest)
        return cls(pace, min(now + LOOK, now + pace.of_idle - pace.between, pace.latest), asked_at)

    def later(self, now: float) -> Waiting:
        """It is too early, or too few ranks are idle: look again."""
        left = self.asked_at - now
        pause = min(self.pace.between, LOOK)
        if left > 0:
            # Between the last two looks, it must show whether a rank is idle.
            pause = left if left <= LOOK else min(LOOK, left - IDLE_INTERVAL)
        return replace(self, due=min(now + pause, self.pace.latest))


@dataclass(frozen=True)
class Confirming:
    """The same ranks are asked once more at `due`, whatever they do."""

    pace: Pace
    due: float
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """The ranks have been asked, and their answers are read at `due`."""

    pace: Pace
    due: float
    ranks: tuple[int, ...]
    since: float
    pause: float = FIRST_READ
    first_answer: float | None = None

    @classmethod
    def begin(cls, pace: Pace, now: float, ranks: Sequence[int]) -> Asked:
        return cls(pace, now + FIRST_READ, tuple(ranks), now)

    def read(self, now: float, answered: int, pending: int) -> Asked | None:
        """The state if the ranks that have yet to answer get more time; None if the probe is over."""
        first_answer = self.first_answer
        if first_answer is None and answered:
            first_answer = now
        until = self.since + FIRST_ANSWER_TIMEOUT if first_answer is None else first_answer + ANSWER_TIMEOUT
        if answered == pending or now >= until:
            return None
        pause = min(2 * self.pause, LONGEST_PAUSE)
        return replace(self, due=now + pause, pause=pause, first_answer=first_answer)


class Idleness:
    """Tells whether processes are idle, from their CPU time at two moments. One that waits for a GPU may be."""

    def __init__(
        self,
        cpu_seconds: Callable[[int], float | None] = system.cpu_seconds,
        may_spin: Callable[[int], bool] = system.may_spin,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        self._may_spin = may_spin
        self._at = 0.0
        self._before: dict[int, float | None] | None = None

    def forget(self) -> None:
        self._before = None

    def idle(self, pids: Sequence[int], now: float) -> set[int] | None:
        """Return those of these processes that have not computed since the last call; None if that was too recent.

        Where the system shows no CPU time, they count as idle.
        """
        if self._before is not None and now < self._at + IDLE_INTERVAL:
            return None
        before = self._before
        elapsed = now - self._at
        self._at = now
        self._before = {pid: self._cpu_seconds(pid) for pid in pids}
        if before is None:
            return None
        most = _STEP + _SHARE * elapsed
        idle = set()
        for pid, seconds in self._before.items():
            has_computed = _has_used_more(most, before.get(pid), seconds)
            if not has_computed or self._may_spin(pid):
                idle.add(pid)
        return idle


def _has_used_more(most: float, before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return False
    return math.isinf(before) or math.isinf(after) or after - before > most


class Prober:
    """Probes the ranks of a run again and again, at growing intervals; reads logs often, which costs them nothing."""

    def __init__(
        self,
        run: Run,
        rules: ProofRules,
        logs: Logs | None,
        now: float,
        idleness: Idleness | None = None,
        is_checked: bool = False,
    ):
        """`is_checked`: torch compares the calls itself."""
        rules_of_logs = replace(rules, may_differ=rules.may_differ or is_checked)
        self._live = LiveLogs(logs, rules_of_logs, now) if logs else None
        self._run = run
        self._rules = rules
        self._logs = logs
        self._idleness = idleness or Idleness()
        # The ranks that have computed until the latest look.
        self._busy: set[int] = set()
        self._evidence = Evidence()
        # The reason why a deadlock is not proven; "" if none is suspected.
        self.doubt = ""
        self._state: Waiting | Confirming | Asked = Waiting.begin(Pace.first(now), now)

    @property
    def due(self) -> float:
        """The moment at which `step` is to be called next."""
        return self._state.due if self._live is None else min(self._state.due, self._live.due)

    def on_news(self, now: float) -> None:
        """Something has happened in the run: wait a while before the next probe."""
        if not isinstance(self._state, Asked):
            self._wait(Pace.first(now), now)

    def probe_now(self, now: float) -> None:
        """Probe all ranks at once: their logs suggest that they wait for each other."""
        if not isinstance(self._state, Asked):
            self._state = Confirming(self._state.pace.again(), now, tuple(range(self._run.job.world_size)))

    def step(self, now: float, pending: Sequence[int], ended: Mapping[int, tuple[str, bytes]]) -> Finding | None:
        """Read the logs, ask, or read the answers. `ended`: for each rank that has ended, how, and what it has left."""
        if self._live is not None and self._live.due < self._state.due:
            finding = self._live.step(now, pending, _how_they_ended(ended))
            if self._live.has_new_suspects:
                self.probe_now(now)
            return finding
        if now < self._state.due:
            return None
        if isinstance(self._state, Asked):
            return self._read(self._state, now, pending, ended)
        ranks = self._ranks_to_ask(self._state, now, pending)
        if ranks:
            # Before the request: this process may be interrupted after it, until all have answered.
            self._state = Asked.begin(self._state.pace, now, ranks)
            self._run.probe(ranks)
        return None

    def _ranks_to_ask(self, state: Waiting | Confirming, now: float, pending: Sequence[int]) -> list[int]:
        """The ranks to be asked now; if none, it is known when to try again."""
        if isinstance(state, Confirming):
            still_pending = [rank for rank in pending if rank in state.ranks]
            if still_pending:
                return still_pending
            state = Waiting(state.pace, state.due, state.due)
        if now >= state.pace.latest:
            return list(pending)
        idle = self._idle(pending, now)
        if idle is None:
            self._state = state.later(now)
            return []
        if self._busy.intersection(idle):
            # What they wait for now is new: earlier probes do not tell how long that may take.
            state = Waiting(state.pace.again(), now, min(state.asked_at, now + FIRST_PROBE))
        self._busy = set(pending).difference(idle)
        if now >= state.asked_at and len(idle) >= min(_FEWEST, len(pending)):
            return idle
        self._state = state.later(now)
        return []

    def _idle(self, pending: Sequence[int], now: float) -> list[int] | None:
        """The ranks of these that are idle; None if that is not known yet."""
        pids = self._run.pids
        idle = self._idleness.idle([pids[rank] for rank in pending], now)
        return None if idle is None else [rank for rank in pending if pids[rank] in idle]

    def _read(
        self, state: Asked, now: float, pending: Sequence[int], ended: Mapping[int, tuple[str, bytes]]
    ) -> Finding | None:
        """Read the answers, and conclude from them when all are there or no more is to be waited for."""
        asked = [rank for rank in state.ranks if rank in pending]
        running = self._answers_of(asked, state.since)
        longer = state.read(now, len(running), len(asked))
        if longer is not None:
            self._state = longer
            return None
        left: Mapping[int, RankRecord | None] = {rank: read_raw(rank, data) for rank, (_, data) in ended.items()}
        if self._logs:
            running, left = self._from_logs(self._logs, running)
        conclusion = judge_probe(self._evidence, running, left, _how_they_ended(ended), self._rules)
        self._evidence = conclusion.evidence
        self.doubt = conclusion.doubt
        if conclusion.is_suspicious:
            self._state = Confirming(state.pace, now + CONFIRMATION, state.ranks)
        else:
            self._wait(state.pace.slower(now, were_all_asked=len(asked) == len(pending)), now)
        return conclusion.finding

    def _wait(self, pace: Pace, now: float) -> None:
        self._state = Waiting.begin(pace, now)
        self._idleness.forget()

    def _answers_of(self, ranks: Sequence[int], since: float) -> dict[int, RankRecord]:
        """The answers that ranks have written since then."""
        answers = {}
        for rank in ranks:
            record = read_raw(rank, content_of(self._run.job.recorder(rank)))
            if record is not None and record.at >= since:
                answers[rank] = record
        return answers

    def _from_logs(
        self, logs: Logs, running: Mapping[int, RankRecord]
    ) -> tuple[dict[int, RankRecord], dict[int, RankRecord]]:
        """The records of the logs: of the ranks that have answered, with their state, and of all others.

        A log has sends and receives, too: that a rank has issued some does not speak against a proof.
        """
        records = logs.records()
        completed = {}
        for rank, answer in running.items():
            # The numbers of messages are those of the answer.
            state = answer.state and replace(answer.state, p2p=False, message=None)
            if rank in records:
                completed[rank] = replace(records[rank], state=state, at=answer.at, creating=answer.creating)
        others = {rank: record for rank, record in records.items() if rank not in running}
        return completed, others


def _how_they_ended(ended: Mapping[int, tuple[str, bytes]]) -> dict[int, str]:
    return {rank: how for rank, (how, _) in ended.items()}
