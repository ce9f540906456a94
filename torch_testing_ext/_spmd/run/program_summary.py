"""A readable summary of the program that a compiled step runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..lower.buckets import Bucket


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


@dataclass(frozen=True)
class StepReport:
    """A summary of the program of the last call. `print(step.report())` shows it."""

    name: str
    backend: str
    world: int
    traces: int
    operations: int
    collectives: dict[str, int]
    buckets: list[Bucket]
    verification: str = "not verified"

    def __str__(self) -> str:
        count = ", ".join(f"{n} {name}" for name, n in self.collectives.items()) or "no collectives"
        lines = [
            f"{self.name}: {self.operations} operations, {count}; {self.backend}, {self.world} ranks, "
            f"traced {self.traces} {'time' if self.traces == 1 else 'times'}; "
            f"{self.verification}"
        ]
        for number, bucket in enumerate(self.buckets):
            kind, dtype = bucket.collective, str(bucket.dtype).removeprefix("torch.")
            lines.append(f"  {number}: {kind:<14} {_size(bucket.nbytes):>10} {dtype}: {_names(bucket.names)}")
        return "\n".join(lines)


def _names(names: list[str], limit: int = 4) -> str:
    if len(names) <= limit:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)} parameters)"


def count_collectives(graph: fx.Graph) -> dict[str, int]:
    """The number of collectives of each kind that a graph starts."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") == "_c10d_functional":
            name = str(node.target).split(".")[1].rstrip("_")
            if name != "wait_tensor":
                counts[name] = counts.get(name, 0) + 1
    return counts
