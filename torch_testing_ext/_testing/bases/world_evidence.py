"""The evidence on a whole world: the logs of its ranks, and what the rules say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_testing_ext import launch
from torch_testing_ext._collectives.findings.finding import Finding
from torch_testing_ext._collectives.findings.opposite_orders import first_inversion
from torch_testing_ext._collectives.findings.sanitizer_reports import finding_of_rank
from torch_testing_ext._collectives.records.raw_records import RawRecord
from torch_testing_ext._collectives.sanitizer.sanitizer_log import LogReader
from torch_testing_ext._collectives.worlds import world_traffic, world_views
from torch_testing_ext._collectives.worlds.unknown_values import after_unknown_value
from torch_testing_ext._collectives.worlds.world_progress import Progress, judge
from torch_testing_ext._collectives.worlds.world_records import COMPARED, CUT, READ, WorldRecords
from torch_testing_ext._process.words import few
from torch_testing_ext.launch import RankEnding, RankReport
from torch_testing_ext.launch.jobs import log_of
from torch_testing_ext.launch.watching.evidence import RankEvidence
from torch_testing_ext.launch.watching.rank_records import RankRecords


class RecordsOfWorld(RankRecords):
    """The records of ranks that leave logs. Of a rank that has passed, only what it has printed stays."""

    def __init__(self, run: launch.Run):
        super().__init__(run, run.began)
        self.world = WorldRecords(keeps_times=run.job.keeps_lanes)

    def take_new(self) -> list[int]:
        ranks = super().take_new()
        for rank in ranks:
            log = LogReader(log_of(self.run.job.directory, rank))
            if self.report(rank).ending is RankEnding.PASSED:
                self.world.add(rank, log)
                self._remove_files(rank)
            log.remove()
        return ranks

    def _remove_files(self, rank: int) -> None:
        job = self.run.job
        for file in (job.account(rank), job.stacks(rank)):
            file.unlink(missing_ok=True)
        if job.log(rank).exists() and not job.log(rank).stat().st_size:
            job.log(rank).unlink()

    def write_lanes(self, reports: Sequence[RankReport], left: Sequence[RawRecord | None]) -> None:
        super().write_lanes([replace(report, recorder=self.world.timed(report.rank)) for report in reports], left)


class WorldFacts:
    """The facts that follow from the logs of a world whose ranks have all ended by themselves."""

    def __init__(self, records: WorldRecords, buffered_sends: bool):
        records.complete()
        self.records = records
        self.progress = Progress(records, buffered_sends)
        # The lines whose assertions were not judged, and those that have ended ranks for that.
        self.not_judged = records.noted(COMPARED)
        self.cuts = records.noted(CUT)

    def note_view(self, with_calls: bool) -> None:
        """Note the world for the reports of a runner, if there is one."""
        if world_views.noted.are_wanted:
            lines = [*self.not_judged, *self.cuts]
            world_views.noted.add(world_traffic.view_of(self.records, self.progress.chain, lines, with_calls))

    def complete(self, evidence: RankEvidence) -> RankEvidence:
        """The evidence with what is wrong with the world, and with its ranks."""
        finding = judge(self.records, self.progress, bool(self.cuts), evidence.expected.may_differ)
        if finding is not None:
            finding = after_unknown_value(self.records, finding)
            classes = few([str(alike) for alike in self.records.classes])
            finding = replace(finding, table=finding.table or tuple(classes))
        reports = tuple(replace(report, found=self._found_by(report.rank)) for report in evidence.reports)
        return replace(evidence, reports=reports, finding=finding)

    def _found_by(self, rank: int) -> tuple[Finding, ...]:
        notes = self.records.class_of[rank].notes
        return tuple(finding_of_rank(rank, note) for note in notes if note["kind"] not in (READ, COMPARED, CUT))

    def warnings(self) -> list[str]:
        """The warnings about a world that is sound."""
        warnings = self.records.reads()
        warnings += [f"not judged: compares communicated values at {line}" for line in self.not_judged]
        inversion = first_inversion(self.records.records)
        if inversion is not None:
            # They do not wait for each other here. With NCCL, they may.
            warnings.append("\n".join([inversion.sentence, *map(str, inversion.lines)]))
        return warnings
