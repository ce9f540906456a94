"""Programs of collectives, with the result that each rank must get, computed in plain Python.

All ranks run the same program, and each can compute the inputs of every other rank: the input of a step is a function
of the step's number and the rank.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from torch_testing_ext._hypothesis.strategies.tensor_strategies import lay_out
from torch_testing_ext._hypothesis.strategies.world_strategies import over_world

Lists = list[list[int]]


def input_value(rank: int, step: int, index: int) -> int:
    """Return the input of `rank` at `index` in a step: small, and different for adjacent ranks, steps and indices."""
    return (3 * rank + 5 * step + index) % 11 + 1


@dataclass(frozen=True)
class Step:
    """One collective. `size`: how many elements a rank passes in (per receiving rank, if each receives its own)."""

    op: str
    size: int = 1
    root: int = 0
    reduce: str = "sum"
    dtype: torch.dtype = torch.float32
    is_async: bool = False
    layout: str = "contiguous"
    sizes: tuple[tuple[int, ...], ...] = ()  # uneven all_to_all: how many elements each rank sends to each

    def __repr__(self) -> str:
        parts = [f"{self.size}"]
        parts += [f"root={self.root}"] if self.op in ROOTED else []
        parts += [self.reduce] if self.op in REDUCING else []
        parts += [str(self.dtype).removeprefix("torch.")] if self.dtype != torch.float32 else []
        parts += ["async"] if self.is_async else []
        parts += [self.layout] if self.layout != "contiguous" else []
        parts += [f"{[list(row) for row in self.sizes]}"] if self.sizes else []
        return f"{self.op}({', '.join(parts)})"


REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCTIONS: dict[str, Callable[[int, int], int]] = {
    "sum": lambda a, b: a + b,
    "max": max,
    "min": min,
    "product": lambda a, b: a * b,
}
OPS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "reduce",
    "send_recv",
    "barrier",
)


# -- the model: lists of numbers


def inputs_of(step: Step, number: int, rank: int, size: int) -> Lists:
    """Return the lists that a rank passes to a step: one per receiving rank if each receives its own, else one."""
    if step.sizes:
        counts: Sequence[int] = step.sizes[rank]
    elif step.op in ("reduce_scatter", "all_to_all", "all_to_all_single", "scatter"):
        counts = [step.size] * size
    else:
        counts = [step.size]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [
        [input_value(rank, number, i) for i in range(end - count, end)] for end, count in zip(ends, counts, strict=True)
    ]


def expected(step: Step, number: int, rank: int, size: int) -> Lists:
    """Return the lists that `rank` must get from a step; none if it gets nothing."""
    inputs = [inputs_of(step, number, other, size) for other in range(size)]
    match step.op:
        case "all_reduce":
            return [_reduced(step, [lists[0] for lists in inputs])]
        case "reduce":
            return [_reduced(step, [lists[0] for lists in inputs])] if rank == step.root else []
        case "reduce_scatter":
            return [_reduced(step, [lists[rank] for lists in inputs])]
        case "broadcast":
            return inputs[step.root]
        case "all_gather" | "all_gather_into_tensor":
            return [lists[0] for lists in inputs]
        case "gather":
            return [lists[0] for lists in inputs] if rank == step.root else []
        case "scatter":
            return [inputs[step.root][rank]]
        case "all_to_all" | "all_to_all_single":
            return [lists[rank] for lists in inputs]
        case "send_recv":
            return [inputs[(rank - 1) % size][0]]
        case "barrier":
            return []
    raise ValueError(f"no such collective: {step.op}")


def _reduced(step: Step, lists: Lists) -> list[int]:
    total = lists[0]
    for other in lists[1:]:
        total = [REDUCTIONS[step.reduce](a, b) for a, b in zip(total, other, strict=True)]
    return total


# -- the collectives themselves


def start(step: Step, number: int, group: Any, device: str) -> Callable[[], list[torch.Tensor]]:
    """Start a step in this rank. Return a function that waits for the step and returns the tensors that it produced."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given = [_tensor(step, numbers, device) for numbers in inputs_of(step, number, rank, size)]
    root = dist.get_global_rank(group, step.root) if step.op in ROOTED else 0
    op = getattr(dist.ReduceOp, step.reduce.upper())
    options: dict[str, Any] = {"group": group, "async_op": step.is_async}
    is_root = rank == step.root

    def zeros(count: int = step.size) -> torch.Tensor:
        return _tensor(step, [0] * count, device)

    match step.op:
        case "all_reduce":
            out = given
            work = dist.all_reduce(given[0], op=op, **options)
        case "reduce":
            out = given if is_root else []
            work = dist.reduce(given[0], root, op=op, **options)
        case "reduce_scatter":
            out = [zeros()]
            work = dist.reduce_scatter(out[0], given, op=op, **options)
        case "broadcast":
            out = given
            work = dist.broadcast(given[0], root, **options)
        case "all_gather":
            out = [zeros() for _ in range(size)]
            work = dist.all_gather(out, given[0], **options)
        case "all_gather_into_tensor":
            whole = torch.zeros(step.size * size, dtype=step.dtype, device=device)
            out = list(whole.chunk(size)) if step.size else [zeros() for _ in range(size)]
            work = dist.all_gather_into_tensor(whole, given[0].contiguous(), **options)
        case "gather":
            out = [zeros() for _ in range(size)] if is_root else []
            work = dist.gather(given[0], out if is_root else None, root, **options)
        case "scatter":
            out = [zeros()]
            work = dist.scatter(out[0], given if is_root else None, root, **options)
        case "all_to_all":
            out = [zeros() for _ in range(size)]
            work = dist.all_to_all(out, given, **options)
        case "all_to_all_single":
            counts_out = [row[rank] for row in step.sizes] if step.sizes else [step.size] * size
            counts_in = list(step.sizes[rank]) if step.sizes else [step.size] * size
            whole = torch.zeros(sum(counts_out), dtype=step.dtype, device=device)
            out = list(torch.split(whole, counts_out))
            work = dist.all_to_all_single(whole, torch.cat(given), counts_out, counts_in, **options)
        case "send_recv":
            return _ring(step, given[0], zeros(), group)
        case "barrier":
            out = []
            work = dist.barrier(**options)
        case _:
            raise ValueError(f"no such collective: {step.op}")

    def finish() -> list[torch.Tensor]:
        if work is not None:
            work.wait()
        return out

    return finish


def _ring(step: Step, mine: torch.Tensor, out: torch.Tensor, group: Any) -> Callable[[], list[torch.Tensor]]:
    """Start a ring: each rank sends to the next one and receives from the previous one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return lambda: [mine]
    after = dist.get_global_rank(group, (rank + 1) % size)
    before = dist.get_global_rank(group, (rank - 1) % size)
    works = [dist.isend(mine, after, group=group), dist.irecv(out, before, group=group)]

    def finish() -> list[torch.Tensor]:
        for work in works:
            assert work is not None
            work.wait()
        return [out]

    return finish


def _tensor(step: Step, numbers: list[int], device: str) -> torch.Tensor:
    return lay_out(torch.tensor(numbers, dtype=step.dtype, device=device), step.layout)


# -- programs


@dataclass(frozen=True)
class Program:
    """A sequence of collectives. The program waits for the asynchronous ones at its end."""

    steps: tuple[Step, ...]

    def run(self, group: Any = None, device: str = "cpu") -> list[list[torch.Tensor]]:
        """Run the program in this rank, and return the tensors that each step produced."""
        group = group or dist.group.WORLD
        finishes = []
        for number, step in enumerate(self.steps):
            # Cached, because a second wait for a received message never ends with gloo (docs/found).
            finish = functools.cache(start(step, number, group, device))
            finishes.append(finish)
            if not step.is_async:
                finish()
        return [finish() for finish in finishes]

    def expected(self, rank: int, size: int) -> list[Lists]:
        """Return the lists that each step must produce in a rank."""
        return [expected(step, number, rank, size) for number, step in enumerate(self.steps)]

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.steps))}]"


def steps(
    size: int, ops: Sequence[str] = OPS, dtypes: Sequence[torch.dtype] = (torch.float32, torch.int64, torch.float64)
) -> st.SearchStrategy[Step]:
    """Steps for groups of `size` ranks."""

    def fill(op: str) -> st.SearchStrategy[Step]:
        # The fields are one draw, because Hypothesis removes a step only if it takes at most four draws.
        fields = _variants(op, size, dtypes)
        sizes: st.SearchStrategy[Any] = st.just(())
        if op == "all_to_all_single":
            row = st.tuples(*[st.integers(0, 3)] * size)
            sizes = st.one_of(sizes, st.tuples(*[row] * size))
        return st.builds(
            lambda size, fields, sizes: Step(op, size, sizes=sizes, **fields),
            st.sampled_from([1, 2, 3, 0, 5, 7]),
            st.sampled_from(fields),
            sizes,
        )

    return st.sampled_from(list(ops)).flatmap(fill)


def _variants(op: str, size: int, dtypes: Sequence[torch.dtype]) -> list[dict[str, Any]]:
    """Return all combinations of the fields of a step except its size, the simplest first."""
    fields: dict[str, Sequence[Any]] = {"is_async": [False, True] if op != "send_recv" else [False]}
    if op != "barrier":
        fields["dtype"] = dtypes
    if op in ROOTED:
        fields["root"] = range(size)
    if op in REDUCING:
        fields["reduce"] = sorted(REDUCTIONS, key=lambda name: name != "sum")
    return [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]


def collective_programs(
    max_steps: int = 4, ops: Sequence[str] = OPS, size: int | None = None
) -> st.SearchStrategy[Program]:
    """Programs for groups of `size` ranks (default: all ranks)."""

    def make(size: int) -> st.SearchStrategy[Program]:
        return st.lists(steps(size, ops), min_size=1, max_size=max_steps).map(lambda chosen: Program(tuple(chosen)))

    return over_world(make) if size is None else make(size)
