"""Programs whose ranks issue collectives of other sizes, as routing of experts and ragged batches do; one slip each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from kit.told import Programs

PROGRAMS = Programs(__name__)
told, quiet = PROGRAMS.told, PROGRAMS.quiet


def counts_of(rank: int, size: int) -> list[int]:
    """The tokens of a rank for each expert."""
    to = torch.randint(0, size, (32,), generator=torch.Generator().manual_seed(rank))
    return torch.bincount(to, minlength=size).tolist()


def splits_of(test: Any) -> tuple[list[int], list[int]]:
    """The tokens that a rank sends to each, and gets from each."""
    size, rank = test.world_size, test.rank
    return counts_of(rank, size), [counts_of(other, size)[rank] for other in range(size)]


def to_experts(test: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[int], list[int]]:
    ins, outs = splits_of(test)
    out = torch.empty(sum(outs), 4, dtype=dtype)
    dist.all_to_all_single(out, torch.ones(32, 4, dtype=dtype), outs, ins)
    return out, ins, outs


@told("rank 6 calls barrier, the others call all_to_all", "in call #2 of the default group", size=8)
def barrier_before_the_way_back(self):
    out, ins, outs = to_experts(self)
    if self.rank == 6:
        dist.barrier()  # rank 6
    dist.all_to_all_single(torch.empty(32, 4), out, ins, outs)  # ranks 0-5, 7


@told("rank 1 calls all_reduce [1] float32", "the others call all_to_all", "in call #1 of the default group", size=5)
def metric_of_one_rank(self):
    if self.rank == 1:
        dist.all_reduce(torch.ones(1))  # rank 1
    to_experts(self)


@told("rank 2 calls all_gather [1] int64", "the others call all_to_all", "in call #2 of the default group", size=4)
def gathers_counts_again(self):
    out, ins, outs = to_experts(self)
    if self.rank == 2:
        dist.all_gather([torch.empty(1, dtype=torch.int64) for _ in range(4)], torch.tensor([5]))  # rank 2
    dist.all_to_all_single(torch.empty(32, 4), out, ins, outs)  # ranks 0, 1, 3


@told("rank 3 calls all_to_all", "float64", "the others call all_to_all", "float32", "in call #1 of", size=4)
def type_of_one_rank(self):
    ins, outs = splits_of(self)
    dtype = torch.float64 if self.rank == 3 else torch.float32
    dist.all_to_all_single(torch.empty(sum(outs), 4, dtype=dtype), torch.ones(32, 4, dtype=dtype), outs, ins)  # rank 3


@told("rank 0 calls all_reduce [4] float32", "the others call all_to_all", "in call #1 of group experts", size=4)
def other_call_in_a_named_group(self):
    group = dist.new_group(group_desc="experts")
    ins, outs = splits_of(self)
    if self.rank == 0:
        dist.all_reduce(torch.ones(4), group=group)  # rank 0
    else:
        dist.all_to_all_single(torch.empty(sum(outs)), torch.ones(32), outs, ins, group=group)  # ranks 1-3


@told("ranks 1, 4 call broadcast [2] float32", "the others call all_to_all", "in call #1 of the", size=6)
def two_ranks_broadcast(self):
    if self.rank in (1, 4):
        dist.broadcast(torch.ones(2), 1)  # ranks 1, 4
    to_experts(self)


@told("rank 1 calls barrier, rank 5 calls all_reduce [3] float32", "call all_to_all", "in call #1 of the", size=6)
def two_ranks_part_in_two_ways(self):
    if self.rank == 1:
        dist.barrier()  # rank 1
    if self.rank == 5:
        dist.all_reduce(torch.ones(3))  # rank 5
    to_experts(self)


@told("rank 2 calls all_to_all", "the others call barrier in call #1", size=4)
def one_rank_has_no_barrier(self):
    ins, outs = splits_of(self)
    if self.rank != 2:
        dist.barrier()  # ranks 0, 1, 3
    dist.all_to_all_single(torch.empty(sum(outs)), torch.ones(32), outs, ins)  # rank 2


if torch.__version__ >= (2, 12):  # before, gloo has no all_to_all of lists

    @told("rank 1 calls barrier, the others call all_to_all", "in call #1", size=4)
    def lists_of_all_to_all(self):
        if self.rank == 1:
            dist.barrier()  # rank 1
        else:
            dist.all_to_all([torch.empty(3) for _ in range(4)], [torch.ones(3) for _ in range(4)])  # ranks 0, 2, 3


# -- scatter and gather: the root gives, or gets, what the others do not


@told("rank 3 calls scatter into [4] int32", "the others call scatter into [4] float32", "in call #1 of the", size=4)
def type_that_a_scatter_gives(self):
    dtype = torch.int32 if self.rank == 3 else torch.float32
    dist.scatter(torch.empty(4, dtype=dtype), [torch.ones(4)] * 4 if self.rank == 0 else None)  # rank 3


@told("rank 2 calls scatter into [5] float32", "the others call scatter into [4] float32", "in call #1 of", size=4)
def size_that_a_scatter_gives(self):
    dist.scatter(torch.empty(5 if self.rank == 2 else 4), [torch.ones(4)] * 4 if self.rank == 0 else None)  # rank 2


@told("rank 2 calls barrier, the others call scatter into [4] float32", "in call #1 of the default group", size=4)
def barrier_before_a_scatter(self):
    if self.rank == 2:
        dist.barrier()  # rank 2
    dist.scatter(torch.empty(4), [torch.ones(4)] * 4 if self.rank == 0 else None)  # ranks 0, 1, 3


@told("rank 1 calls barrier, the others call gather [4] float32", "in call #1 of the default group", size=4)
def barrier_before_a_gather(self):
    if self.rank == 1:
        dist.barrier()  # rank 1
    dist.gather(torch.ones(4), [torch.empty(4) for _ in range(4)] if self.rank == 0 else None)  # ranks 0, 2, 3


@told("rank 3 calls gather [4] int32", "the others call gather [4] float32", "in call #1 of the", size=4)
def type_of_a_gather(self):
    mine = torch.ones(4, dtype=torch.int32 if self.rank == 3 else torch.float32)
    dist.gather(mine, [torch.empty(4) for _ in range(4)] if self.rank == 0 else None)  # rank 3


@told("rank 2 calls scatter into [4] float32 root 1", "the others call scatter into [4] float32 root 0", levels=(2,))
def root_of_a_scatter(self):
    root = 1 if self.rank == 2 else 0
    dist.scatter(torch.empty(4), [torch.ones(4)] * 3 if self.rank == root else None, src=root)  # rank 2


# -- sound


@quiet(size=4)
def routing_there_and_back(self):
    out, ins, outs = to_experts(self)
    back = torch.empty(32, 4)
    dist.all_to_all_single(back, out * 2, ins, outs)
    self.assertEqual(back, torch.full((32, 4), 2.0))


@quiet(size=4)
def experts_without_tokens(self):
    ins = [12 * (to == 0) for to in range(4)]
    outs = [12 * (self.rank == 0)] * 4
    dist.all_to_all_single(torch.empty(sum(outs)), torch.ones(12), outs, ins)


@quiet()
def scatter_and_gather_from_each(self):
    for root in range(3):
        parts = [torch.full((4,), float(rank)) for rank in range(3)] if self.rank == root else None
        mine = torch.empty(4)
        dist.scatter(mine, parts, src=root)
        dist.gather(mine, [torch.empty(4) for _ in range(3)] if self.rank == root else None, dst=root)


@quiet()
def scatter_into_other_shapes(self):
    """The numbers of elements are equal."""
    mine = torch.empty(8, 8) if self.rank == 0 else torch.empty(4, 16)
    dist.scatter(mine, [torch.ones(8, 8)] * 3 if self.rank == 0 else None)


@quiet()
def flat_and_square(self):
    dist.all_reduce(torch.ones(4, 4) if self.rank else torch.ones(16))


@quiet()
def objects_of_other_sizes(self):
    gathered = [None] * 3
    dist.all_gather_object(gathered, "x" * 100 * self.rank)
    mine = [None]
    dist.scatter_object_list(mine, ["a", "bb", "ccc"] if self.rank == 0 else None)
