"""The parent's side of the sanitizer: reads the logs of the ranks of a test, while they run and at the end.

Comparing headers costs next to nothing. The logs are read only when the ranks have stopped issuing anything, or
have issued different things.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_testing_ext._collectives.findings.deadlocks import deadlocked, waiting_calls
from torch_testing_ext._collectives.findings.diverged_replicas import first_diverged
from torch_testing_ext._collectives.findings.finding import Finding
from torch_testing_ext._collectives.findings.opposite_orders import first_inversion
from torch_testing_ext._collectives.findings.sanitizer_reports import finding_of_rank
from torch_testing_ext._collectives.findings.unbuffered_sends import first_unbuffered
from torch_testing_ext._collectives.proof.proof_of_hang import ProofRules, endless_mismatch
from torch_testing_ext._collectives.records.issued_calls import RankRecord
from torch_testing_ext._collectives.sanitizer.files_beside_logs import looks_beside, looks_of, results_beside
from torch_testing_ext._collectives.sanitizer.log_headers import have_notes, is_quiet, show_mismatch, uses_groups
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import AGAIN, SanitizeKind
from torch_testing_ext._collectives.sanitizer.sanitizer_log import LogContent, LogReader
from torch_testing_ext._process.words import grouped
from torch_testing_ext.launch.jobs import Sanitize
from torch_testing_ext.launch.rank_reports import RankReport, all_passed


def again(path: Path, incarnation: int) -> Path:
    """The log of a later process of a rank, beside that of the first one."""
    return path.with_name(path.name + AGAIN * incarnation)


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
        """The events of faults in the logs of all processes of a rank."""
        return [event for content in self._of_processes(rank) for event in content.events]

    def headers(self) -> list[bytes]:
        return [reader.header() for reader in self._readers]

    def read(self) -> dict[int, LogContent]:
        """The logs; of a rank that was started again, that of its latest process."""
        contents = {}
        for rank in range(len(self._readers)):
            content = self._latest(rank)
            if content is not None:
                contents[rank] = content
        return contents

    def _latest(self, rank: int) -> LogContent | None:
        contents = list(self._of_processes(rank))
        if not contents:
            return None
        *before, latest = contents
        latest.earlier = [group for content in before for group in content.groups]
        return latest

    def _of_processes(self, rank: int) -> Iterator[LogContent]:
        """The logs of all processes of a rank."""
        for incarnation in itertools.count():
            content = (LogReader(again(self._paths[rank], incarnation)) if incarnation else self._readers[rank]).read()
            if content is None:
                return
            yield content

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
        """Whether it was there at the last step, and every rank has come that would show more."""
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
