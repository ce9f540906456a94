"""The report of a step that the engine runs: what is averaged and gathered in a call, in which buckets, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch_testing_ext._process.words import first_names, size_in_words

from .gradient_buckets import BackwardPlan
from .managed_params import ManagedParam
from .roster import Roster
from .row_optimizers import why_whole


@dataclass(frozen=True)
class BucketLine:
    """One bucket of gradients: the collective that averages it, its size, and its parameters."""

    nbytes: int
    params: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"all_reduce of {size_in_words(self.nbytes)}, {len(self.params)} gradients: {first_names(self.params, 4)}"
        )


@dataclass(frozen=True)
class EngineReport:
    """A summary of the last call of a step. `str()` of it is for people."""

    name: str
    world: int
    calls: int
    parameters: int
    sharded: int
    backwards: tuple[tuple[BucketLine, ...], ...]
    late: tuple[bool, ...]  # for each backward, whether its buckets start only at its end
    buffers: int  # bytes that all ranks get from rank 0
    gathered: Mapping[str, int]  # bytes of the last call, by what they were
    whole: Mapping[str, str]  # parameters that "fully_shard" keeps whole, and why
    optimizers: tuple[str, ...]

    @property
    def bytes_per_call(self) -> int:
        """The size of all that one call averages, gathers and broadcasts."""
        averaged = sum(line.nbytes for lines in self.backwards for line in lines)
        return averaged + sum(self.gathered.values()) + self.buffers

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """The lines of the text."""
        yield (
            f"{self.name}: engine on {self.world} ranks, {self.calls} calls, {self.parameters} parameters "
            f"({self.sharded} sharded), {size_in_words(self.bytes_per_call)} per call"
        )
        for number, (lines, late) in enumerate(zip(self.backwards, self.late, strict=True), 1):
            size = sum(line.nbytes for line in lines)
            when = "at its end" if late else "as they fill"
            yield f"  backward {number} averages {size_in_words(size)} in buckets that start {when}"
            yield from (f"    {line}" for line in lines)
        for title, size in self.gathered.items():
            yield f"  {title}: {size_in_words(size)}"
        if self.buffers:
            yield f"  broadcast of buffers: {size_in_words(self.buffers)}"
        yield from (f"  {name} stays whole: {reason}" for name, reason in self.whole.items())
        yield from (f"  {line}" for line in self.optimizers)


def report_of(name: str, world: int, calls: int, roster: Roster, gathered: Mapping[str, int]) -> EngineReport:
    """The report of a step whose last call had this roster."""
    planned = [*roster.plans.get("inside", ()), *roster.plans.get("after", ())]
    plans = [plan for plan in planned if plan is not None]
    return EngineReport(
        name,
        world,
        calls,
        len(roster.params),
        sum(managed.sharded for managed in roster.params),
        tuple(_buckets(plan) for plan in plans),
        tuple(not plan.overlaps for plan in plans),
        roster.shared,
        dict(gathered),
        {m.name: _why_replicated(m) for m in roster.params if roster.shards and not m.sharded},
        tuple(_optimizers(roster)),
    )


def _buckets(plan: BackwardPlan) -> tuple[BucketLine, ...]:
    return tuple(BucketLine(bucket.nbytes, tuple(managed.name for managed in bucket.params)) for bucket in plan.buckets)


def _why_replicated(managed: ManagedParam) -> str:
    if not managed.layout.shape.numel():
        return "it is empty"
    return "no module holds it" if managed.layout.shape else "it has no dimensions"


def _optimizers(roster: Roster) -> Iterator[str]:
    for optimizer in roster.optimizers:
        reason = why_whole(optimizer)
        if not roster.shards:
            yield f"{type(optimizer).__name__} updates whole parameters, as all of them are replicated"
        elif reason is None and optimizer in roster.sparse:
            yield f"{type(optimizer).__name__} updates whole parameters: gradients are sparse"
        elif reason is None:
            yield f"{type(optimizer).__name__} updates the rank's rows"
        else:
            yield f"{type(optimizer).__name__} updates whole parameters: {reason}"
