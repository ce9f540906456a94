"""The parent's side of the sanitizer: reads the logs of the ranks of a test, while they run and at the end.

Comparing headers costs next to nothing. The logs are read only when the ranks have stopped issuing anything, or have
issued different things.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch_testing_ext._collectives.findings import Finding, deadlocked, finding_of_rank, waits
from torch_testing_ext._collectives.order import first_inversion
from torch_testing_ext._collectives.parted import first_parted
from torch_testing_ext._collectives.proof import ProofRules, endless_mismatch
from torch_testing_ext._collectives.records import RankRecord
from torch_testing_ext._collectives.unbuffered import first_unbuffered
from torch_testing_ext._sanitizer.kinds import SanitizeKind
from torch_testing_ext._sanitizer.log import (
    LogContent,
    LogReader,
    have_notes,
    is_quiet,
    looks_beside,
    looks_of,
    show_mismatch,
    uses_groups,
)

from .job import Sanitize
from .rank_report import RankReport, all_passed

INTERVAL = 0.04
# Until then, a call that raises for the mismatch has done so.
CONFIRMATION = 0.04
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

    def headers(self) -> list[bytes]:
        return [reader.header() for reader in self._readers]

    def read(self) -> dict[int, LogContent]:
        contents = {rank: reader.read() for rank, reader in enumerate(self._readers)}
        return {rank: content for rank, content in contents.items() if content is not None}

    def records(self) -> dict[int, RankRecord]:
        return records_of(self.read())

    def gravest_note(self) -> Finding | None:
        """The gravest finding of a rank so far."""
        contents = self.read().items()
        found = [finding_of_rank(rank, note) for rank, content in contents for note in content.notes]
        return min(found, key=lambda one: one.gravity, default=None)

    def complete(self, reports: Sequence[RankReport]) -> list[RankReport]:
        """The reports with what the logs show. Ranks that have passed and agree are not looked at closer."""
        have_passed, headers = all_passed(reports), self.headers()
        may_be_inverted = SanitizeKind.ORDER in self.sanitize.kinds and uses_groups(headers) > 1
        if have_passed and is_quiet(headers) and not may_be_inverted:
            return self._with_parted(reports)
        contents = self.read()
        completed = []
        for report in reports:
            content = contents.get(report.rank)
            if content is not None:
                found = tuple(finding_of_rank(report.rank, note) for note in content.notes)
                report = replace(report, issued=content.record(report.rank), found=found)
            completed.append(report)
        if have_passed and completed:
            issued = [one.issued for one in completed if one.issued is not None]
            completed[0] = replace(completed[0], found=(*completed[0].found, *self._of_order(issued)))
        return self._with_parted(completed)

    def _with_parted(self, reports: Sequence[RankReport]) -> list[RankReport]:
        """The reports with the first tensor that is not alike on all ranks, though it must be."""
        if SanitizeKind.REPLICAS not in self.sanitize.kinds:
            return list(reports)
        parted = first_parted({rank: looks_of(path) for rank, path in enumerate(self._paths)})
        return [
            replace(report, found=(*report.found, parted))
            if parted is not None and report.rank == parted.ranks[0]
            else report
            for report in reports
        ]

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
        self._since = 0.0  # when there was a candidate first
        self._suspects: frozenset[tuple[int, int]] = frozenset()
        self.has_new_suspects = False  # at the last step: ranks seem to wait for each other, as they did not before
        self.due = now + INTERVAL

    def step(self, now: float, pending: Sequence[int], ended: Mapping[int, str]) -> Finding | None:
        """A mismatch, once it is certain, or what a rank has found, once all are quiet. `ended`: how ranks did."""
        self.due, self.has_new_suspects = now + INTERVAL, False
        headers = self._logs.headers()
        has_stopped, self._before = headers == self._before, headers
        if not has_stopped:
            self._quiet_since = now
        elif have_notes(headers) and now >= self._quiet_since + QUIET_AFTER_NOTE:
            return self._logs.gravest_note()
        if self._candidate is None and (headers == self._judged or not (has_stopped or show_mismatch(headers))):
            return None
        self._judged = headers if has_stopped else []
        records = self._logs.records()
        latest = [calls[-1] for record in records.values() for calls in record.calls.values()]
        found = endless_mismatch(list(records.values()), latest, self._rules)
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

    def _suspect(self, records: Mapping[int, RankRecord], pending: Sequence[int], ended: Mapping[int, str]) -> None:
        waiting = {rank: calls for rank, calls in waits(list(records.values())).items() if rank in pending}
        found = deadlocked(waiting, ended)
        suspects = frozenset((rank, wait.call.order) for rank, wait in found.items())
        self.has_new_suspects = bool(suspects) and suspects != self._suspects
        self._suspects = suspects
