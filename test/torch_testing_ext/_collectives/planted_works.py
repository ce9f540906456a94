"""Faults in the use of work, and of buffers before `wait()`, planted one by one; they belong to `planted_sanitized`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from planted import WORLD_SIZE, ones
from planted_sanitized import ALL, BOTH, fault


@fault("failed", "nobody waited for the work of all_reduce [4] float32 (planted_works.py:", bases=ALL)
def work_without_a_wait(self):
    dist.all_reduce(ones(), async_op=True)
    dist.barrier()


@fault("failed", "nobody waited for the work of recv [4] float32")
def receive_without_a_wait(self):
    if self.rank == 0:
        dist.send(ones(), 1)
    elif self.rank == 1:
        dist.irecv(ones(), 0)


@fault("failed", "a buffer of all_reduce [4] float32 was written before wait() (planted_works.py:", bases=ALL)
def buffer_written_before_the_wait(self):
    mine = ones()
    work = dist.all_reduce(mine, async_op=True)
    mine.add_(1)
    work.wait()


@fault("failed", "a buffer of broadcast [4] float32 was written before wait()")
def buffer_written_through_a_view(self):
    mine = ones()
    work = dist.broadcast(mine, 0, async_op=True)
    mine.view(2, 2)[0] = 3
    work.wait()


@fault("failed", "a buffer of all_gather_into_tensor [4] float32 was resized or freed before wait()")
def buffer_freed_before_the_wait(self):
    out = torch.empty(4 * WORLD_SIZE)
    work = dist.all_gather_into_tensor(out, ones(), async_op=True)
    # The storage is kept, so that nothing else is overwritten.
    kept = out.untyped_storage()
    out.set_()
    work.wait()
    del kept


@fault(
    "failed",
    "a buffer of all_reduce [4] float32 was read by aten.add.Tensor before wait() (planted_works.py:",
    kinds=("races",),
    bases=ALL,
)
def buffer_read_before_the_wait(self):
    mine = ones()
    work = dist.all_reduce(mine, async_op=True)
    mine + 1
    work.wait()


@fault("failed", "a buffer of all_gather_into_tensor [4] float32 was read by aten.sum before wait()", kinds=("races",))
def part_of_an_output_read_before_the_wait(self):
    out = torch.empty(4 * WORLD_SIZE)
    work = dist.all_gather_into_tensor(out, ones(), async_op=True)
    out[2:3].sum()
    work.wait()


@fault("failed", "a buffer of all_gather [4] float32 was written by aten.add_.Tensor before wait()", kinds=("races",))
def input_written_before_the_wait(self):
    mine = ones()
    work = dist.all_gather([torch.empty(4) for _ in range(WORLD_SIZE)], mine, async_op=True)
    mine.add_(1)
    work.wait()


@fault("failed", "nobody waited for the work of all_reduce [4] float32 (planted_works.py:", kinds=("races",))
def work_without_a_wait_beside_reads(self):
    dist.all_reduce(ones(), async_op=True)
    dist.barrier()


@fault("failed", "ranks 1, 2 passed without all_reduce #1 [4], which rank 0 has issued", kinds=("calls",), bases=BOTH)
def async_all_reduce_that_others_leave_out(self):
    if self.rank == 0:
        dist.all_reduce(ones(), async_op=True)


@fault("failed", "rank 2 passed without broadcast #1 [4], which ranks 0, 1 have issued", kinds=("calls",))
def broadcast_that_a_rank_leaves_out(self):
    if self.rank != 2:
        dist.broadcast(ones(), 0, async_op=True)
