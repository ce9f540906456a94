"""The report of a step that the engine runs: what is averaged and gathered in a call, in which buckets, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .gradient_buckets import BackwardPlan
from .optimizer_kinds import why_whole
from .roster import Roster

_SHOWN = 4  # names per bucket


@dataclass(frozen=True)
class BucketLine:
    """One bucket of gradients: the collective that averages it, its size, and its parameters."""

    nbytes: int
    params: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.params[:_SHOWN]) + (", ..." if len(self.params) > _SHOWN else "")
        return f"all_reduce of {mebibytes(self.nbytes)}, {len(self.params)} gradients: {names}"


@dataclass(frozen=True)
class EngineReport:
    """A summary of the last call of a step. `str()` of it is for people."""

    name: str
    world: int
    calls: int
    parameters: int
    sharded: int
    backwards: tuple[tuple[BucketLine, ...], ...]
    gathered: Mapping[str, int]  # bytes of the last call, by what they were
    optimizers: tuple[str, ...]

    @property
    def bytes_per_call(self) -> int:
        """The size of all that one call averages and gathers."""
        return sum(line.nbytes for lines in self.backwards for line in lines) + sum(self.gathered.values())

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.name}: engine on {self.world} ranks, {self.calls} calls, {self.parameters} parameters "
            f"({self.sharded} sharded), {mebibytes(self.bytes_per_call)} per call"
        )
        for number, lines in enumerate(self.backwards, 1):
            size = sum(line.nbytes for line in lines)
            yield f"  backward {number} averages {mebibytes(size)} in {len(lines)} buckets"
            yield from (f"    {line}" for line in lines)
        for title, size in self.gathered.items():
            yield f"  {title}: {mebibytes(size)}"
        yield from (f"  {line}" for line in self.optimizers)


def report_of(name: str, world: int, calls: int, roster: Roster, gathered: Mapping[str, int]) -> EngineReport:
    """The report of a step whose last call had this roster."""
    plans = [*roster.plans.get("inside", ()), *roster.plans.get("after", ())]
    return EngineReport(
        name,
        world,
        calls,
        len(roster.params),
        sum(managed.sharded for managed in roster.params),
        tuple(_buckets(plan) for plan in plans if plan is not None),
        dict(gathered),
        tuple(_optimizers(roster)),
    )


def _buckets(plan: BackwardPlan) -> tuple[BucketLine, ...]:
    return tuple(BucketLine(bucket.nbytes, tuple(managed.name for managed in bucket.params)) for bucket in plan.buckets)


def _optimizers(roster: Roster) -> Iterator[str]:
    for optimizer in roster.optimizers:
        reason = why_whole(optimizer)
        if not roster.shards:
            yield f"{type(optimizer).__name__} updates whole parameters, as all of them are replicated"
        elif reason is None:
            yield f"{type(optimizer).__name__} updates the rank's rows"
        else:
            yield f"{type(optimizer).__name__} updates whole parameters: {reason}"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.3g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB"
