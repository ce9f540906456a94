"""Values that no rank of a world knows: where ranks have read them before they went different ways."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_testing_ext._collectives.findings.finding import Doing, Finding
from torch_testing_ext._process.code_sites import Site

from .world_records import READ, RankStep, WorldRecords


def after_unknown_value(world: WorldRecords, finding: Finding) -> Finding:
    """The finding as one that need not be true, if ranks have read such a value before."""
    read = _last_read(world, finding)
    if read is None:
        return finding
    method, site = read
    value = "a value that a whole world does not know"
    prefix = f"line {site.line} read {value}, so this need not be true: "
    line = f"{method} read {value}, after which ranks may take other ways   {site}"
    brief = prefix + finding.brief if finding.brief else ""
    return replace(finding, sentence=prefix + finding.sentence, brief=brief, lines=(line, *finding.lines))


def _last_read(world: WorldRecords, finding: Finding) -> tuple[str, Site] | None:
    """The last read before two ranks of a finding differ; else, the last before what is found."""
    doing = {line.rank: line for line in finding.lines if isinstance(line, Doing)}
    blamed = [rank for rank in finding.ranks if rank < len(world.records)]
    others = [rank for rank in (*doing, *range(len(world.records))) if rank not in blamed]
    ranks = {world.class_of[rank].ranks[0]: rank for rank in (*blamed, *others[:1])}
    notes = [note for rank in ranks.values() for note in world.class_of[rank].notes if note["kind"] == READ]
    reads = {Site(*note["site"]): note["text"] for note in notes if note["site"]}
    ways = [_steps_until(world, rank, doing.get(rank)) for rank in ranks.values()]
    common = [_length_of_common(ways[0], steps) for steps in ways[1:]]
    until = [(steps[:length], ways[0][:length]) for steps, length in zip(ways[1:], common, strict=True)]
    for steps in (*itertools.chain(*until), *ways):
        found = next((step.wait.site for step in reversed(steps) if step.wait and step.wait.site in reads), None)
        if found is not None:
            return reads[found], found
    return None


def _steps_until(world: WorldRecords, rank: int, doing: Doing | None) -> Sequence[RankStep]:
    """The steps of a rank until what a finding says of it."""
    steps = world.class_of[rank].steps
    if doing is None or doing.site is None:
        return steps
    at = [number for number, step in enumerate(steps) if step.call is not None and step.call.site == doing.site]
    return steps[: at[-1]] if at else steps


def _length_of_common(first: Sequence[RankStep], second: Sequence[RankStep]) -> int:
    """Count the steps that two ranks have in common, and the next one."""
    alike = 0
    for one, other in zip(first, second, strict=False):
        if _way(one) != _way(other):
            break
        alike += 1
    return alike + 1


def _way(step: RankStep) -> tuple[Any, ...]:
    if step.call is None:
        assert step.wait is not None
        return (step.wait.site,)
    return step.slot, step.call.kind, step.call.inputs, step.call.site
