"""A readable summary of the program that a captured step runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..engine.engine_report import mebibytes
from ..lower.buckets import Bucket
from ..lower.graphs import is_collective

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
    verification: str

    def __str__(self) -> str:
        count = ", ".join(f"{n} {name}" for name, n in self.collectives.items()) or "no collectives"
        times = "once" if self.recordings == 1 else f"{self.recordings} times"
        lines = [
            f"{self.name}: {self.operations} operations, {count}; captured on {self.world} ranks, recorded {times}, "
            f"{self.verification}"
        ]
        for number, bucket in enumerate(self.buckets):
            dtype = str(bucket.dtype).removeprefix("torch.")
            names = ", ".join(bucket.names[:_SHOWN]) + (", ..." if len(bucket.names) > _SHOWN else "")
            lines.append(f"  {number}: {bucket.collective:<14} {mebibytes(bucket.nbytes):>10} {dtype}: {names}")
        return "\n".join(lines)


def count_collectives(graph: fx.Graph) -> dict[str, int]:
    """The number of collectives of each kind that a graph starts."""
    counts: dict[str, int] = {}
    for node in filter(is_collective, graph.nodes):
        name = str(node.target).split(".")[1].rstrip("_")
        counts[name] = counts.get(name, 0) + 1
    return counts
