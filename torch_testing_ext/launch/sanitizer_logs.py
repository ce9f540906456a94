"""The parent's side of the sanitizer: reads the logs of the ranks of a test, while they run and at the end.

Comparing headers costs next to nothing. The logs are read only when the ranks have stopped issuing anything, or have
issued different things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch_testing_ext._collectives.findings import Finding, deadlocked, finding_of_rank, first_mismatch, waits
from torch_testing_ext._collectives.order import first_inversion
from torch_testing_ext._collectives.proof import DEFAULT_OF_GROUPS, ProofRules
from torch_testing_ext._collectives.records import RankRecord, read_record
from torch_testing_ext._sanitizer.kinds import SanitizeKind
from torch_testing_ext._sanitizer.log import LogContent, LogReader, is_quiet, show_mismatch, uses_groups

from .job import Sanitize
from .rank_report import RankReport, all_passed

INTERVAL = 0.04
# Until then, a call that raises for the mismatch has done so.
CONFIRMATION = 0.04
# Members that have yet to come would show which ranks are the exception.
AWAITED_TIMEOUT = 0.5


class Logs:
    """The logs of all ranks of a run, by rank; of a run that is not sanitized, none."""

    def __init__(self, paths: Sequence[Path], sanitize: Sanitize | None):
        self.sanitize = sanitize or Sanitize()
        self._readers = [LogReader(path) for path in paths] if self.sanitize.kinds else []

    def __bool__(self) -> bool:
        return bool(self._readers)

    def remove(self) -> None:
        """Remove the files: nothing more is to be read. A persistent rank would leave one for each of its tests."""
        for reader in self._readers:
            reader.remove()

    def headers(self) -> list[bytes]:
        return [reader.header() for reader in self._readers]

    def read(self) -> dict[int, LogContent]:
        contents = {rank: reader.read() for rank, reader in enumerate(self._readers)}
        return {rank: content for rank, content in contents.items() if content is not None}

    def records(self) -> dict[int, RankRecord]:
        """The records of the ranks so far."""
        return records_of(self.read())

    def complete(self, reports: Sequence[RankReport]) -> list[RankReport]:
        """The reports with what the logs show. Ranks that have passed and agree are not looked at closer."""
        have_passed, headers = all_passed(reports), self.headers()
        may_be_inverted = SanitizeKind.ORDER in self.sanitize.kinds and uses_groups(headers) > 1
        if have_passed and is_quiet(headers) and not may_be_inverted:
            return list(reports)
        contents = self.read()
        completed = []
        for report in reports:
            content = contents.get(report.rank)
            if content is not None:
                found = tuple(finding_of_rank(report.rank, note) for note in content.notes)
                report = replace(report, issued=content.text(), found=found)
            completed.append(report)
        if have_passed and may_be_inverted and completed:
            hazard = first_inversion(list(records_of(contents).values()))
            if hazard is not None:
                hazard = replace(hazard, is_hazard=not self.sanitize.fails_for_order)
                completed[0] = replace(completed[0], found=(*completed[0].found, hazard))
        return completed


def records_of(contents: Mapping[int, LogContent]) -> dict[int, RankRecord]:
    found = {rank: read_record(rank, content.text()) for rank, content in contents.items()}
    return {rank: record for rank, record in found.items() if record is not None}


class LiveLogs:
    """Reads the logs again and again while the ranks run.

    A mismatch counts if it is still there at the next step, and nothing has raised for it.
    """

    def __init__(self, logs: Logs, rules: ProofRules, now: float):
        self._logs = logs
        self._rules = rules
        self._before: list[bytes] = []
        self._judged: list[bytes] = []
        self._candidate: Finding | None = None
        self._since = 0.0  # when there was a candidate first
        self._suspects: frozenset[tuple[int, int]] = frozenset()
        self.has_new_suspects = False  # at the last step: ranks seem to wait for each other, as they did not before
        self.due = now + INTERVAL

    def step(self, now: float, pending: Sequence[int], ended: Mapping[int, str]) -> Finding | None:
        """A mismatch, once it is certain. `ended`: how each rank that has ended did so."""
        self.due, self.has_new_suspects = now + INTERVAL, False
        headers = self._logs.headers()
        has_stopped, self._before = headers == self._before, headers
        if self._candidate is None and (headers == self._judged or not (has_stopped or show_mismatch(headers))):
            return None
        self._judged = headers if has_stopped else []
        records = self._logs.records()
        found = self._mismatch(list(records.values()))
        if found is not None and self._candidate is not None and found.sentence == self._candidate.sentence:
            is_complete = not set(found.awaited).intersection(pending)
            if is_complete or now > self._since + AWAITED_TIMEOUT:
                return found
        if self._candidate is None:
            self._since = now
        self._candidate = found
        if found is not None:
            self.due = now + CONFIRMATION
        elif has_stopped:
            self._suspect(records, pending, ended)
        return None

    def _mismatch(self, records: Sequence[RankRecord]) -> Finding | None:
        if self._rules.may_differ or not self._is_endless(records):
            return None
        return first_mismatch(records, unless_raised=True)

    def _is_endless(self, records: Sequence[RankRecord]) -> bool:
        """A test of a group's own time-out goes on by itself: its end shows what a mismatch means."""
        latest = (calls[-1] for record in records for calls in record.calls.values())
        return all(call.timeout >= min(self._rules.endless, DEFAULT_OF_GROUPS) for call in latest)

    def _suspect(self, records: Mapping[int, RankRecord], pending: Sequence[int], ended: Mapping[int, str]) -> None:
        waiting = {rank: calls for rank, calls in waits(list(records.values())).items() if rank in pending}
        found = deadlocked(waiting, ended)
        suspects = frozenset((rank, wait.call.order) for rank, wait in found.items())
        self.has_new_suspects = bool(suspects) and suspects != self._suspects
        self._suspects = suspects
