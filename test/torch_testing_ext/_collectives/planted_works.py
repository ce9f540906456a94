"""Faults in the use of work, and of buffers before `wait()`, planted one by one; they belong to `planted_sanitized`."""

from __future__ import annotations

import threading

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


@fault("failed", "rank 0: nobody waited for the work of recv [4] float32")
def receive_that_is_dropped_before_a_barrier(self):
    """gloo lets the barrier hang then, mostly."""
    if self.rank == 0:
        dist.irecv(ones(), 1)
    elif self.rank == 1:
        dist.send(ones(), 0)
    dist.barrier()


@fault("failed", "a buffer of all_reduce [1000000] float32 was resized or freed before wait()")
def buffer_freed_while_it_is_written(self):
    """Ranks crash, or lose their peers."""
    mine = ones(1_000_000)
    work = dist.all_reduce(mine, async_op=True)
    mine.untyped_storage().resize_(0)
    work.wait()


def in_flight(use):
    """A program that uses the output of a collective before the wait."""

    def body(self):
        mine = ones()
        work = dist.all_reduce(mine, async_op=True)
        use(mine)
        work.wait()

    return body


def in_another_thread(use):
    def run(tensor):
        thread = threading.Thread(target=use, args=(tensor,))
        thread.start()
        thread.join()

    return run


USES = {
    "printed": ("read by __repr__()", print, ()),
    "formatted": ("read by __format__()", "{}".format, ()),
    "seen_by_numpy": ("read by numpy()", lambda tensor: tensor.numpy(), ()),
    "listed": ("read by tolist()", lambda tensor: tensor.tolist(), ()),
    "listed_in_another_thread": ("read by tolist()", in_another_thread(lambda tensor: tensor.tolist()), ()),
    "added_in_another_thread": ("read by aten.add.Tensor", in_another_thread(lambda tensor: tensor + 1), ("races",)),
    "written_through_data": ("written through .data", lambda tensor: tensor.data.add_(1), ()),
    "reduced_twice": (
        "written by all_reduce [4] float32",
        lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
        (),
    ),
    "reduced_and_broadcast": ("written by broadcast [4] float32", lambda tensor: dist.broadcast(tensor, 0), ()),
}
for _name, (_how, _use, _kinds) in USES.items():
    _body = in_flight(_use)
    _body.__name__ = f"output_that_is_{_name}"
    fault("failed", f"a buffer of all_reduce [4] float32 was {_how} before wait()", "issued at", kinds=_kinds)(_body)


@fault("failed", "a buffer of all_gather_into_tensor [4] float32 was written before wait()", "issued at planted_works")
def part_of_a_flat_input_written_before_the_wait(self):
    flat, out = torch.ones(8), torch.empty(4 * WORLD_SIZE)
    work = dist.all_gather_into_tensor(out, flat[:4], async_op=True)
    flat[:4].add_(1)
    work.wait()


@fault("failed", "a buffer of all_gather_into_tensor [4] float32 was written before wait()", "issued at planted_works")
def input_written_through_numpy(self):
    mine, out = ones(), torch.empty(4 * WORLD_SIZE)
    array = mine.numpy()
    work = dist.all_gather_into_tensor(out, mine, async_op=True)
    array[0] = 3
    work.wait()


@fault("failed", "a buffer of all_gather [100000] float32 was written before wait()", "issued at planted_works")
def end_of_a_large_input_written_through_numpy(self):
    mine, out = ones(100_000), [ones(100_000) for _ in range(WORLD_SIZE)]
    array = mine.numpy()
    work = dist.all_gather(out, mine, async_op=True)
    array[-1] = 3
    work.wait()


@fault("failed", "rank 0: outputs of all_gather [4] float32 overlap each other (planted_works.py:")
def outputs_that_are_one(self):
    dist.all_gather([torch.empty(4)] * WORLD_SIZE, ones())


@fault("failed", "a buffer of all_reduce [4] float32 was read by send [4] float32 before wait()", "issued at")
def message_of_a_tensor_that_is_reduced(self):
    mine = ones()
    work = dist.all_reduce(mine, async_op=True)
    if self.rank == 0:
        dist.send(mine, 1)
    elif self.rank == 1:
        dist.recv(ones(), 0)
    work.wait()


@fault("failed", "nobody waited for the future of all_reduce_coalesced [4] float32 (planted_works.py:")
def coalesced_all_reduce_without_a_wait(self):
    dist.all_reduce_coalesced([ones()], async_op=True)
    dist.barrier()


@fault("failed", "nobody waited for the future of all_reduce [4] float32 (planted_works.py:")
def future_without_a_wait(self):
    self.future = dist.all_reduce(ones(), async_op=True).get_future()


@fault("failed", "nobody waited for the future of all_reduce [4] float32 (planted_works.py:")
def result_of_a_callback_without_a_wait(self):
    dist.all_reduce(ones(), async_op=True).get_future().then(lambda future: future.value()[0].div_(3))
    dist.barrier()


@fault("failed", "nobody waited for the work", "rank 1 left before all_reduce #1, which ranks 0, 2 issued")
def async_all_reduce_without_a_wait_that_a_rank_leaves_out(self):
    if self.rank != 1:
        dist.all_reduce(ones(), async_op=True)


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


@fault("failed", "ranks 1, 2 left before all_reduce #1, which rank 0 issued", kinds=("calls",), bases=BOTH)
def async_all_reduce_that_others_leave_out(self):
    if self.rank == 0:
        dist.all_reduce(ones(), async_op=True)


@fault("failed", "rank 2 left before broadcast #1, which ranks 0, 1 issued", kinds=("calls",))
def broadcast_that_a_rank_leaves_out(self):
    if self.rank != 2:
        dist.broadcast(ones(), 0, async_op=True)
