"""Faults in the use of work, and of buffers before `wait()`, planted one by one; they belong to `planted_sanitized`."""

from __future__ import annotations

import threading
from functools import partial

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


@fault("failed", "nobody waited for the work of all_reduce_coalesced [4] float32 [3] float32 (planted_works.py:")
def coalescing_manager_without_a_wait(self):
    with dist.distributed_c10d._coalescing_manager(async_ops=True):
        dist.all_reduce(ones())
        dist.all_reduce(ones(3))
    dist.barrier()


@fault("failed", "a buffer of all_reduce [4] float32 was written before wait() (planted_works.py:", "issued at")
def buffer_written_before_the_wait_of_a_thread(self):
    mine = ones()
    work = dist.all_reduce(mine, async_op=True)
    mine.add_(1)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()


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


# -- writes of which torch counts none for the buffer, after the call has written it


def once_complete(array):
    """Wait until a call has written all of a buffer of ones, seen by an array that shares its memory."""
    while (array == 1).any():
        pass


def write(target, at=0):
    target[at] = 77


ALIASES = {
    "numpy": lambda flat: (flat, partial(write, flat.numpy())),
    "a_chunk": lambda flat: (flat[2:8], partial(flat.chunk(3)[1].mul_, 5)),
    "an_overlapping_slice": lambda flat: (flat[:8], partial(flat[4:10].mul_, 5)),
    "a_parameter": lambda flat: (flat, partial(write, parameter_in(flat).data)),
    "a_strided_view": lambda flat: (flat[:8], partial(flat.as_strided((3,), (3,), 1).mul_, 5)),
    "data_taken_before": lambda flat: (flat, partial(flat.data.mul_, 5)),
    "another_storage": lambda flat: (flat, partial(torch.empty(0).set_(flat.untyped_storage(), 4, (4,)).mul_, 5)),
    "dlpack": lambda flat: (flat, partial(torch.from_dlpack(flat)[4:6].mul_, 5)),
    "a_buffer_of_bytes": lambda flat: (flat, partial(write, memoryview(flat.numpy()).cast("B"), 3)),
    "another_type": lambda flat: (flat, partial(write, torch.frombuffer(flat.numpy(), dtype=torch.int32), 5)),
}


def parameter_in(flat):
    parameter = torch.nn.Parameter(torch.empty(4))
    parameter.data = flat[4:8]
    return parameter


def written_through(name):
    def body(self):
        flat = ones(12)
        tensor, change = ALIASES[name](flat)
        inside = tensor.numpy()
        work = dist.all_reduce(tensor, async_op=True)
        once_complete(inside)
        change()
        work.wait()

    return body


for _name in ALIASES:
    _body = written_through(_name)
    _body.__name__ = f"output_written_through_{_name}"
    fault("failed", "a buffer of all_reduce [", "was written before wait()", "issued at planted_works.py:")(_body)


@fault(
    "failed", "rank 0: a buffer of broadcast [4] float32 was written before wait(): element 0 is 77.0, the inputs give"
)
def broadcast_written_through_numpy(self):
    mine = ones() * (3 if self.rank == 2 else 1)
    array = mine.numpy()
    work = dist.broadcast(mine, 2, async_op=True)
    if self.rank == 0:
        once_complete(array)
        write(array)
    work.wait()


@fault("failed", "rank 1: a buffer of all_gather_into_tensor [4] float32 was written before wait(): element 1 is 77.0,")
def gathered_output_written_through_numpy(self):
    out = ones(4 * WORLD_SIZE)
    array = out.numpy()
    work = dist.all_gather_into_tensor(out, 2 * ones(), async_op=True)
    once_complete(array)
    if self.rank == 1:
        write(array, 5)
    work.wait()


@fault("failed", "rank 2: a buffer of all_gather [4] float32 was written before wait()")
def listed_output_written_through_numpy(self):
    parts = [ones() for _ in range(WORLD_SIZE)]
    arrays = [part.numpy() for part in parts]
    work = dist.all_gather(parts, 2 * ones(), async_op=True)
    for array in arrays:
        once_complete(array)
    if self.rank == 2:
        write(arrays[0], 3)
    work.wait()


@fault(
    "failed", "rank 1: a buffer of all_to_all_single [3] int64 was written before wait(): element 0 is 77, the inputs"
)
def exchanged_output_written_through_numpy(self):
    out = torch.ones(WORLD_SIZE, dtype=torch.int64)
    array = out.numpy()
    work = dist.all_to_all_single(out, torch.arange(2, 2 + WORLD_SIZE), async_op=True)
    once_complete(array)
    if self.rank == 1:
        write(array, 2)
    work.wait()


@fault(
    "failed", "rank 1: a buffer of recv [4] float32 was written before wait(): element 0 is 77.0, the inputs give 2.0"
)
def message_written_through_numpy(self):
    if self.rank == 0:
        dist.send(2 * ones(), 1)
    elif self.rank == 1:
        got = ones()
        array = got.numpy()
        work = dist.irecv(got, 0)
        once_complete(array)
        write(array)
        work.wait()


@fault("failed", "a buffer of all_reduce [100000] float32 was written before wait(): an element is ", bases=BOTH)
def chunk_of_a_large_output_written_through_numpy(self):
    mine = ones(100_000)
    array = mine.numpy()
    work = dist.all_reduce(mine, async_op=True)
    once_complete(array)
    array[30_000:32_000] = 77
    work.wait()


@fault(
    "failed", "a buffer of all_reduce_coalesced [4] float32 [3] float32 was written before wait(): element 2 is 77.0"
)
def coalesced_output_written_through_numpy(self):
    tensors = [ones(), ones(3)]
    array = tensors[1].numpy()
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    once_complete(array)
    write(array, 2)
    manager.wait()


@fault("failed", "a buffer of recv [4] float32 was written before wait(): element 3 is 77.0, the inputs give 2.0")
def batched_message_written_through_numpy(self):
    after, before, got = (self.rank + 1) % WORLD_SIZE, (self.rank - 1) % WORLD_SIZE, ones()
    array = got.numpy()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, 2 * ones(), after), dist.P2POp(dist.irecv, got, before)])
    once_complete(array)
    write(array, 3)
    for work in works:
        work.wait()
