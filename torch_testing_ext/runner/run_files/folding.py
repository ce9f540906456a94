"""Several runs as one: a fold over journals, with a lane for each machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch_testing_ext.runner.events import (
    AttemptEnded,
    Collected,
    Event,
    RunBegan,
    RunEnded,
    TestFinished,
    UnitBegan,
    UnitEnded,
)
from torch_testing_ext.runner.model import (
    Attempt,
    FinishedTest,
    Lease,
    NodeOfRun,
    OmittedTest,
    Summary,
    Test,
    TestId,
    Unit,
)
from torch_testing_ext.runner.report.journal_reader import RecordedRun

from .run_file import RunFacts, RunFile, StoredRun, UnrelatedRuns

# Machines whose clocks differ by more than that have not run together: one of them is wrong.
_LONGEST_NIGHT = 2 * 86_400.0
_Recorded = tuple[RunFacts, RecordedRun]


def merged(files: Sequence[RunFile]) -> tuple[tuple[StoredRun, ...], tuple[str, ...]]:
    """The runs of all files, and the shards that none has. Raises UnrelatedRuns if they do not belong together."""
    first_with: dict[str, Path] = {}
    projects: dict[str, Path] = {}
    runs = []
    for file in files:
        for run in file.runs:
            if run.facts.digest in first_with:
                raise UnrelatedRuns(f"{file.path} has the same run as {first_with[run.facts.digest]}: name it once")
            first_with[run.facts.digest] = file.path
            if run.facts.project:
                projects.setdefault(run.facts.project, file.path)
            runs.append(run)
    if len(projects) > 1:
        (one, first), (other, second), *_ = projects.items()
        raise UnrelatedRuns(f"{second} is of the project {other}, {first} of {one}: merge files of one project")
    there = {run.facts.shard for run in runs}
    numbers = {shard.partition("/")[2] for shard in there if shard}
    known_missing = {shard for file in files for shard in file.missing}
    missing = known_missing.union(
        f"{index}/{number}" for number in numbers for index in range(1, int(number) + 1)
    ).difference(there)
    return tuple(runs), tuple(sorted(missing))


def folded(recorded: Sequence[_Recorded], missing: Sequence[str] = ()) -> RecordedRun:
    """One run for several: the events of one after those of the other, each in the lanes of its machine."""
    if len(recorded) == 1 and not missing:
        return recorded[0][1]
    names = _names(recorded)
    clocks = [_began(run).clock for _, run in recorded]
    first = min(clocks)
    warnings = [f"shard {shard} is missing: its tests are not in this report" for shard in missing]
    if max(clocks) - first > _LONGEST_NIGHT:
        warnings.append("the clocks of these machines disagree by days: their lanes begin together")
        clocks = [first] * len(clocks)
    parts = [
        _Shifted(name, clock - first, number) for number, (name, clock) in enumerate(zip(names, clocks, strict=True))
    ]
    runs = [run for _, run in recorded]
    events: list[Event] = [_collected(runs), _beginning(runs, parts, first)]
    for run, part in zip(runs, parts, strict=True):
        events += [part.event(event) for event in run.events if isinstance(event, _KEPT)]
    summary = _summary(runs, parts, warnings)
    return RecordedRun(runs[0].header, (*events, RunEnded(summary)), summary)


_KEPT = (UnitBegan, AttemptEnded, TestFinished, UnitEnded)


def _began(run: RecordedRun) -> RunBegan:
    return next(event for event in run.events if isinstance(event, RunBegan))


def _names(recorded: Sequence[_Recorded]) -> list[str]:
    """A name for the machine of each run: its own, with its shard if it ran several."""
    hosts = [_began(run).header.host or f"machine {number}" for number, (_, run) in enumerate(recorded, 1)]
    often = Counter(hosts)
    names = []
    for host, (facts, _) in zip(hosts, recorded, strict=True):
        names.append(f"{host} {facts.shard}" if often[host] > 1 and facts.shard else host)
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[number] = f"{name} #{seen[name]}"
    return names


class _Shifted:
    """Moves what a run says to the lanes of its machine, and to the clock of all."""

    def __init__(self, machine: str, later: float, number: int):
        self.machine = machine
        self._later = later
        # Units of different runs have the same numbers.
        self._first_unit = number * 1_000_000

    def event(self, event: Event) -> Event:
        match event:
            case UnitBegan():
                return UnitBegan(self._unit(event.unit), self._lease(event.lease), event.at + self._later)
            case UnitEnded():
                return UnitEnded(self._unit(event.unit), self._lease(event.lease), event.at + self._later)
            case AttemptEnded():
                return replace(event, attempt=self._attempt(event.attempt))
            case TestFinished(finished):
                return TestFinished(self.finished(finished))
        return event

    def finished(self, finished: FinishedTest) -> FinishedTest:
        return FinishedTest(tuple(self._attempt(attempt) for attempt in finished.attempts))

    def unit(self, unit: Unit) -> Unit:
        return self._unit(unit)

    def nodes(self, run: RunBegan) -> tuple[NodeOfRun, ...]:
        if run.nodes:
            return tuple(replace(node, name=f"{self.machine} {node.name}") for node in run.nodes)
        return (NodeOfRun(self.machine, run.devices, run.slots, len(run.devices)),)

    def ends(self, summary: Summary) -> float:
        return summary.seconds + self._later

    def _unit(self, unit: Unit) -> Unit:
        return replace(unit, number=unit.number + self._first_unit)

    def _attempt(self, attempt: Attempt) -> Attempt:
        return replace(attempt, began=attempt.began + self._later, lease=self._lease(attempt.lease))

    def _lease(self, lease: Lease) -> Lease:
        if not lease.devices and not lease.slots:
            return lease
        return replace(lease, node=f"{self.machine} {lease.node}".strip())


def _collected(runs: Sequence[RecordedRun]) -> Collected:
    """The tests that all of them leave out: a test that one has run is not left out."""
    ran = {test.id for run in runs for test in _began(run).tests}
    left_out: dict[TestId, OmittedTest] = {}
    for run in runs:
        for event in run.events:
            if isinstance(event, Collected):
                left_out.update((each.test, each) for each in event.left_out if each.test not in ran)
    return Collected(tuple(left_out.values()))


def _beginning(runs: Sequence[RecordedRun], parts: Sequence[_Shifted], clock: float) -> RunBegan:
    began = [_began(run) for run in runs]
    tests: dict[object, Test] = {test.id: test for run in began for test in run.tests}
    nodes = tuple(node for run, part in zip(began, parts, strict=True) for node in part.nodes(run))
    hosts = list(dict.fromkeys(run.header.host for run in began if run.header.host))
    header = replace(
        began[0].header,
        command=" + ".join(dict.fromkeys(run.header.command for run in began)),
        host=", ".join(hosts),
        devices="; ".join(dict.fromkeys(run.header.devices for run in began if run.header.devices)),
        commit=", ".join(dict.fromkeys(run.header.commit for run in began if run.header.commit)),
        uncommitted_changes=any(run.header.uncommitted_changes for run in began),
    )
    return RunBegan(
        tuple(tests.values()),
        tuple(part.unit(unit) for run, part in zip(began, parts, strict=True) for unit in run.units),
        tuple(f"{node.name}:{device}" for node in nodes for device in node.devices),
        sum(run.slots for run in began),
        clock,
        fake=any(run.fake for run in began),
        repetitions=max(run.repetitions for run in began),
        header=header,
        nodes=nodes,
    )


def _summary(runs: Sequence[RecordedRun], parts: Sequence[_Shifted], warnings: Sequence[str]) -> Summary:
    summaries = [run.summary for run in runs]
    finished = [
        part.finished(test) for summary, part in zip(summaries, parts, strict=True) for test in summary.finished
    ]
    own = [warning for summary in summaries for warning in summary.warnings]
    errors = [summary.error for summary in summaries if summary.error]
    return Summary(
        tuple(finished),
        max(part.ends(summary) for part, summary in zip(parts, summaries, strict=True)),
        summaries[0].policy,
        any(summary.interrupted for summary in summaries),
        tuple(dict.fromkeys(test for summary in summaries for test in summary.unfinished)),
        tuple(dict.fromkeys([*warnings, *own])),
        "\n".join(errors),
    )
