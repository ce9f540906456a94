"""A readable summary of the program that a captured step runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..engine.engine_report import mebibytes
from ..lower.buckets import Bucket
from ..lower.graphs import is_collective
from .program import Program

_SHOWN = 4  # names per bucket


@dataclass(frozen=True)
class StepReport:
    """A summary of the program of the last call. `print(step.report())` shows it."""

    name: str
    world: int
    recordings: int
    operations: int
    collectives: dict[str, int]
    buckets: list[Bucket]
    verified: int  # how often

    def __str__(self) -> str:
        count = ", ".join(f"{n} {name}" for name, n in self.collectives.items()) or "no collectives"
        verified = f"verified {self.verified} times" if self.verified else "not verified"
        lines = [
            f"{self.name}: {self.operations} operations, {count}; captured on {self.world} ranks, "
            f"recorded {self.recordings} times, {verified}"
        ]
        for number, bucket in enumerate(self.buckets):
            dtype = str(bucket.dtype).removeprefix("torch.")
            names = ", ".join(bucket.names[:_SHOWN]) + (", ..." if len(bucket.names) > _SHOWN else "")
            lines.append(f"  {number}: {bucket.collective:<14} {mebibytes(bucket.nbytes):>10} {dtype}: {names}")
        return "\n".join(lines)


def report_of(name: str, program: Program, recordings: int) -> StepReport:
    """The report of a step whose last call ran this program."""
    nodes = program.lowered.module.graph.nodes
    operations = sum(node.op not in ("placeholder", "output") for node in nodes)
    kinds = Counter(str(node.target).split(".")[1].rstrip("_") for node in nodes if is_collective(node))
    world, buckets = program.state.layouts[0].world, program.lowered.buckets
    return StepReport(name, world, recordings, operations, dict(kinds), buckets, program.verified)
