"""Calls with short texts in a file with a short name: nothing is cut, and each row has one line."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from kit.told import Programs
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

PROGRAMS = Programs(__name__)


def told(*texts: str, **options: Any) -> Any:
    return PROGRAMS.told(*texts, is_whole=True, **options)


@told("rank 1 calls barrier, the others call all_reduce [4] float32", shown=("in other_calls",))
def other_calls(self):
    if self.rank == 1:
        dist.barrier()  # rank 1
    dist.all_reduce(torch.ones(4))  # ranks 0, 2


@told("rank 1 calls all_reduce [4] int32", "the others call all_reduce [4] float32", shown=("[4] int32", "[4] float32"))
def types(self):
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if self.rank == 1 else torch.float32))  # rank 1


@told("rank 2 calls barrier, the others call scatter into [4] float32", shown=("scatter into [4] float32",))
def a_scatter(self):
    if self.rank == 2:
        dist.barrier()  # rank 2
    dist.scatter(torch.empty(4), [torch.ones(4)] * 3 if self.rank == 0 else None)  # ranks 0, 1


@told("rank 0 calls gather [4] int32", "the others call gather [4] float32", shown=("gather [4] int32",))
def a_gather(self):
    mine = torch.ones(4, dtype=torch.int32 if self.rank == 0 else torch.float32)
    dist.gather(mine, [torch.empty_like(mine) for _ in range(3)] if self.rank == 0 else None)  # rank 0


@told("rank 2 calls broadcast [4] int32", "the others call broadcast [4] float32", shown=("broadcast [4] int32",))
def a_broadcast(self):
    dist.broadcast(torch.ones(4, dtype=torch.int32 if self.rank == 2 else torch.float32), 0)  # rank 2


@told("rank 2 calls barrier, the others call all_to_all", levels=(1,))
def an_exchange(self):
    if self.rank == 2:
        dist.barrier()  # rank 2
    dist.all_to_all_single(torch.empty(6), torch.ones(6), [2, 2, 2], [2, 2, 2])  # ranks 0, 1


@told("rank 0 calls all_reduce [3] float32", "the others call all_gather_into_tensor [3] float32", levels=(2,))
def a_gather_into_a_tensor(self):
    mine = torch.ones(3)
    if self.rank == 0:
        dist.all_reduce(mine)  # rank 0
    dist.all_gather_into_tensor(torch.empty(9), mine)  # ranks 1, 2


@told("rank 1 calls reduce [4] float32 max root 1", "the others call reduce [4] float32 sum root 0", levels=(2,))
def roots(self):
    root, op = (1, dist.ReduceOp.MAX) if self.rank == 1 else (0, dist.ReduceOp.SUM)
    dist.reduce(torch.ones(4), root, op)  # rank 1


@told("rank 1 calls all_reduce [5] float32", "in call #1 of group dp", shown=("all_reduce [5] float32",))
def a_named_group(self):
    group = dist.new_group(group_desc="dp")
    dist.all_reduce(torch.ones(5 if self.rank == 1 else 4), group=group)  # rank 1


@told("rank 1 calls all_reduce [2] int32 [3] int32", "the others call all_reduce [2] float32 [3] float32", levels=(1,))
def coalesced(self):
    dtype = torch.int32 if self.rank == 1 else torch.float32
    with dist.distributed_c10d._coalescing_manager():
        for size in (2, 3):
            dist.all_reduce(torch.ones(size, dtype=dtype))  # rank 1


@told("rank 2 left before all_reduce #2; ranks 0, 1 are waiting in it", shown=("in all_reduce #2 [3]",))
def a_rank_that_leaves(self):
    dist.all_reduce(torch.ones(3))
    if self.rank == 2:
        return  # rank 2
    dist.all_reduce(torch.ones(3))  # ranks 0, 1


@told("rank 0 waits in group a (all_reduce #1", "for rank 1, which waits in group b (reduce #1", shown=("waiting for",))
def a_cycle(self):
    first, second = (dist.new_group(group_desc=name) for name in "ab")
    if self.rank == 1:
        dist.reduce(torch.ones(4), 2, group=second)  # rank 1
    dist.all_reduce(torch.ones(4), group=first)  # ranks 0, 2


@told("rank 0 sends [4] float32 to rank 1, which receives [4] int32, in message #1 of the default group")
def a_message(self):
    if self.rank == 0:
        dist.send(torch.ones(4), 1)  # rank 0
    if self.rank == 1:
        dist.recv(torch.empty(4, dtype=torch.int32), 0)  # rank 1


@told("rank 1 of 3 raised ValueError: planted", shown=("raised",))
def an_error(self):
    if self.rank == 1:
        raise ValueError("planted")  # rank 1
    dist.barrier()  # ranks 0, 2


@told("rank 1 calls all_gather_into_tensor", "the others call barrier", levels=(2,))
def a_dtensor(self):
    mesh = dist.init_device_mesh("cpu", (3,))
    tensor = distribute_tensor(torch.ones(12), mesh, [Shard(0)], src_data_rank=None)
    if self.rank == 1:
        tensor.redistribute(placements=[Replicate()])  # rank 1
    dist.barrier()  # ranks 0, 2
