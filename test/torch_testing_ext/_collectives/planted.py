"""Faults in the use of collectives, planted one by one: the program of all ranks, and what is to be said about it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from kit.planted_ranks import WORLD_SIZE as WORLD_SIZE

DEFAULT = "the default group (ranks 0-2)"
PROCESSES, ALL_BASES = ("fresh", "persistent"), ("fresh", "persistent", "threaded")


@dataclass(frozen=True)
class Fault:
    """A planted fault: the outcome of the test, texts of its message in order, and the bases that can have it."""

    body: Callable[[Any], None]
    outcome: str
    texts: tuple[str, ...]
    bases: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def fault(outcome: str, *texts: str, bases: tuple[str, ...] = ALL_BASES) -> Callable[[Any], Any]:
    def plant(body: Callable[[Any], None]) -> Callable[[Any], None]:
        FAULTS[body.__name__] = Fault(body, outcome, texts, bases)
        return body

    return plant


def ones(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def mesh_of_ranks() -> Any:
    """All ranks, on devices of the kind on which tensors are made: torch moves those of a DTensor to the mesh's."""
    return dist.init_device_mesh(torch.get_default_device().type, (WORLD_SIZE,))


def type_of(rank: int) -> torch.dtype:
    """Another type in rank 1, of the same size."""
    return torch.int32 if rank == 1 else torch.float32


def in_call(number: int, group: str, one: str, others: str) -> str:
    return f"ranks disagree in call #{number} of {group}: rank 1 calls {one}, ranks 0, 2 call {others}"


# -- another size: gloo aborts the ranks that get more than they expect


@fault("failed", in_call(2, DEFAULT, "all_reduce [400] bfloat16", "all_reduce [400] float32"), bases=PROCESSES)
def size_that_aborts_a_rank(self):
    dist.barrier()
    dist.all_reduce(ones(400, dtype=torch.bfloat16 if self.rank == 1 else torch.float32))


@fault("failed", in_call(1, DEFAULT, "broadcast [4] float32", "broadcast [4] float64"))
def size_that_aborts_all_but_one(self):
    """The one that is left has lost its peers."""
    dist.broadcast(ones(dtype=torch.float64 if self.rank != 1 else torch.float32), 0)
    dist.barrier()


@fault("error", "raised", "ValueError: the reason", "SIGABRT", 'raise ValueError("the reason")', bases=PROCESSES)
def error_in_flight_in_a_rank_that_aborts(self):
    try:
        if self.rank == 1:
            raise ValueError("the reason")
        dist.all_reduce(ones(400))
    finally:
        dist.all_reduce(ones())


# -- another type: the bytes fit, so every rank passes


@fault("failed", in_call(1, DEFAULT, "all_reduce [4] int32", "all_reduce [4] float32"), "planted.py:")
def dtype_of_all_reduce(self):
    dist.all_reduce(ones(dtype=type_of(self.rank)))


@fault("failed", in_call(1, DEFAULT, "broadcast [4] int32", "broadcast [4] float32"))
def dtype_of_broadcast(self):
    dist.broadcast(ones(dtype=type_of(self.rank)), 0)


@fault("failed", in_call(1, DEFAULT, "reduce [4] int32", "reduce [4] float32"))
def dtype_of_reduce(self):
    dist.reduce(ones(dtype=type_of(self.rank)), 0)


@fault("failed", "rank 1 calls all_gather [4] int32", bases=PROCESSES)
def dtype_of_all_gather(self):
    mine = ones(dtype=type_of(self.rank))
    dist.all_gather([torch.empty_like(mine) for _ in range(WORLD_SIZE)], mine)


@fault("failed", "rank 1 calls all_gather [4] int32", bases=PROCESSES)
def dtype_of_all_gather_into_tensor(self):
    mine = ones(dtype=type_of(self.rank))
    dist.all_gather_into_tensor(torch.empty(4 * WORLD_SIZE, dtype=mine.dtype), mine)


@fault("failed", "rank 1 calls gather [4] int32", bases=PROCESSES)
def dtype_of_gather(self):
    mine = ones(dtype=type_of(self.rank))
    dist.gather(mine, [torch.empty_like(mine) for _ in range(WORLD_SIZE)] if self.rank == 0 else None, dst=0)


@fault("failed", "rank 1 calls scatter", bases=PROCESSES)
def dtype_of_scatter(self):
    mine = ones(dtype=type_of(self.rank))
    dist.scatter(mine, [torch.ones_like(mine) for _ in range(WORLD_SIZE)] if self.rank == 0 else None, src=0)


@fault("failed", "rank 1 calls all_to_all [3] int32", bases=PROCESSES)
def dtype_of_all_to_all(self):
    mine = ones(WORLD_SIZE, type_of(self.rank))
    dist.all_to_all_single(torch.empty_like(mine), mine)


@fault("failed", "in call #1 of the default group", "int32", bases=PROCESSES)
def dtype_of_reduce_scatter(self):
    mine = ones(WORLD_SIZE, type_of(self.rank))
    dist.reduce_scatter_tensor(torch.empty(1, dtype=mine.dtype), mine)


@fault("failed", in_call(2, DEFAULT, "all_reduce [4] int32", "all_reduce [4] float32"))
def dtype_after_a_barrier(self):
    dist.barrier()
    dist.all_reduce(ones(dtype=type_of(self.rank)))


@fault("failed", in_call(1, DEFAULT, "all_reduce [4] int32", "all_reduce [4] float32"))
def dtype_of_an_async_all_reduce(self):
    dist.all_reduce(ones(dtype=type_of(self.rank)), async_op=True).wait()


@fault("failed", "in call #1 of group dp (ranks 0, 1): rank 0 calls all_reduce [4] float32, rank 1", bases=PROCESSES)
def dtype_in_a_subgroup(self):
    group = dist.new_group([0, 1], group_desc="dp")
    if self.rank < 2:
        dist.all_reduce(ones(dtype=type_of(self.rank)), group=group)


@fault("failed", "in call #1 of group mesh_dp (ranks 0, 1)", "int32", bases=PROCESSES)
def dtype_in_a_mesh(self):
    if self.rank < 2:
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    else:
        return
    dist.all_reduce(ones(dtype=type_of(self.rank)), group=mesh.get_group("dp"))


# -- another number of elements


@fault("failed", in_call(1, DEFAULT, "all_reduce [5] float32", "all_reduce [4] float32"), bases=PROCESSES)
def count_of_all_reduce(self):
    dist.all_reduce(ones(5 if self.rank == 1 else 4))


@fault("failed", in_call(1, DEFAULT, "all_reduce [6] float32", "all_reduce [4] float32"), bases=PROCESSES)
def count_before_a_barrier(self):
    dist.all_reduce(ones(6 if self.rank == 1 else 4))
    dist.barrier()


@fault("failed", "rank 1 calls all_reduce [4] int32 [3] int32", "  planted.py:", bases=PROCESSES)
def dtype_of_a_coalesced_all_reduce(self):
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(ones(4, type_of(self.rank)))
        dist.all_reduce(ones(3, type_of(self.rank)))


# -- another operation


@fault("failed", in_call(1, DEFAULT, "all_gather [4] float32", "all_reduce [4] float32"), bases=PROCESSES)
def all_gather_against_all_reduce(self):
    if self.rank == 1:
        dist.all_gather([ones() for _ in range(WORLD_SIZE)], ones())
    else:
        dist.all_reduce(ones())


@fault("failed", in_call(1, DEFAULT, "barrier", "all_reduce [4] float32"), bases=PROCESSES)
def barrier_against_all_reduce(self):
    if self.rank == 1:
        dist.barrier()
    else:
        dist.all_reduce(ones())


@fault("failed", in_call(1, DEFAULT, "broadcast [4] float32", "reduce [4] float32"), bases=PROCESSES)
def opposite_order_in_one_group(self):
    calls = [lambda: dist.reduce(ones(), 0), lambda: dist.broadcast(ones(), 0)]
    for call in reversed(calls) if self.rank == 1 else calls:
        call()


@fault("failed", "rank 1 calls all_reduce [4] float32, ranks 0, 2 call all_gather [1] int64", bases=PROCESSES)
def object_collective_against_all_reduce(self):
    if self.rank == 1:
        dist.all_reduce(ones())
    else:
        dist.all_gather_object([None] * WORLD_SIZE, self.rank)


# -- left alone


@fault("error", "rank 1 left before all_reduce #2; ranks 0, 2 are waiting in it", "planted.py:")
def early_return(self):
    dist.barrier()
    if self.rank != 1:
        dist.all_reduce(ones(3))


@fault("error", "rank 1 skipped before all_reduce #1; ranks 0, 2 are waiting in it")
def early_skip(self):
    if self.rank == 1:
        raise unittest.SkipTest("not here")
    dist.all_reduce(ones(3))


@fault("error", "rank 1 of 3 raised", "ValueError: no such layer", "rank 1 raised before all_reduce #1; ")
def exception_before_the_collective(self):
    if self.rank == 1:
        raise ValueError("no such layer")
    dist.all_reduce(ones(3))


@fault("failed", "AssertionError", "rank 1 failed before all_reduce #1; ", bases=PROCESSES)
def failure_before_the_collective(self):
    if self.rank == 1:
        self.assertEqual(1, 2)
    dist.all_reduce(ones(3))


@fault("error", "rank 1 of 3 exited with code 0", "before the test finished", bases=("fresh",))
def exit_before_the_collective(self):
    if self.rank == 1:
        os._exit(0)
    dist.all_reduce(ones(3))


@fault("error", "rank 1 of 3 exited with code 0", "before the test finished", bases=("fresh",))
def exit_in_the_middle_of_a_collective(self):
    works = [dist.all_reduce(ones(1 << 16), async_op=True)]
    if self.rank == 1:
        os._exit(0)
    works.append(dist.all_reduce(ones(), async_op=True))
    for work in works:
        work.wait()


@fault("error", "rank 0 left before all_reduce #1 of group dp; rank 1 is waiting in it", bases=PROCESSES)
def group_destroyed_before_a_collective(self):
    group = dist.new_group([0, 1], group_desc="dp")
    dist.barrier()  # else rank 1 may still be connecting
    if self.rank == 0:
        dist.destroy_process_group(group)
    elif self.rank == 1:
        dist.all_reduce(ones(), group=group)


@fault("error", "ranks 0, 2 left before all_reduce #3; rank 1 is waiting in it")
def one_iteration_more(self):
    for _ in range(3 if self.rank == 1 else 2):
        dist.all_reduce(ones())


@fault("error", "rank 1 left before all_reduce #1 of group dp; rank 0 is waiting in it", bases=PROCESSES)
def early_return_in_a_subgroup(self):
    group = dist.new_group([0, 1], group_desc="dp")
    if self.rank == 0:
        dist.all_reduce(ones(), group=group)


# -- waiting for each other


def _two_groups() -> tuple[Any, Any]:
    return dist.new_group([0, 1], group_desc="dp"), dist.new_group([0, 1], group_desc="tp")


@fault(
    "error",
    "rank 0 waits in group dp (all_reduce #1, line ",
    ") for rank 1, which waits in group tp (all_reduce #1",
    "for rank 0",
    bases=PROCESSES,
)
def opposite_order_of_two_groups(self):
    dp, tp = _two_groups()
    if self.rank < 2:
        for group in (dp, tp) if self.rank == 0 else (tp, dp):
            dist.all_reduce(ones(), group=group)


# -- messages


@fault("failed", "rank 0 sends [4] int32 to rank 1, which receives [4] float32", bases=PROCESSES)
def type_of_a_message(self):
    if self.rank == 0:
        dist.send(ones(4, torch.int32), 1)
    elif self.rank == 1:
        dist.recv(ones(4), 0)


@fault("failed", "rank 0 sends [4] float32 to rank 1, which receives [6] float32", bases=("fresh",))
def count_of_a_message(self):
    if self.rank == 0:
        dist.send(ones(4), 1)
    elif self.rank == 1:
        dist.recv(ones(6), 0)


@fault(
    "error",
    "rank 0 waits in the default group (send #1 to rank 1, tag 1,",
    "(recv #1 from rank 0, tag 2,",
    "for rank 0",
    bases=("fresh",),
)
def tag_of_a_message(self):
    if self.rank == 0:
        dist.send(ones(), 1, tag=1)
    elif self.rank == 1:
        dist.recv(ones(), 0, tag=2)


@fault("error", "rank 2 left without receiving; rank 1 is waiting in send #1 to rank 2", bases=("fresh",))
def batch_of_messages_without_a_receive(self):
    after, before = (self.rank + 1) % WORLD_SIZE, (self.rank - 1) % WORLD_SIZE
    operations = [dist.P2POp(dist.isend, ones(), after), dist.P2POp(dist.irecv, ones(), before)]
    for work in dist.batch_isend_irecv(operations[: 1 if self.rank == 2 else 2]):
        work.wait()


@fault("error", "rank 1 left without sending; rank 2 is waiting in recv #4 from rank 1", bases=("fresh",))
def one_step_more_in_a_pipeline(self):
    for _ in range(4 if self.rank == 2 else 3):
        if self.rank > 0:
            dist.recv(ones(), self.rank - 1)
        if self.rank < WORLD_SIZE - 1:
            dist.send(ones(), self.rank + 1)


@fault(
    "error",
    "rank 0 waits in the default group (recv #1 from rank 1, line ",
    "which waits in the default group (recv #1 from rank 2, line ",
    "for rank 0",
    bases=PROCESSES,
)
def receives_in_a_ring(self):
    incoming = ones()
    dist.recv(incoming, (self.rank + 1) % WORLD_SIZE)
    dist.send(ones(), (self.rank - 1) % WORLD_SIZE)


@fault("error", "rank 0 waits in the default group (recv #1 from rank 1, line ", "for rank 0", bases=("fresh",))
def receives_beside_a_send_that_nobody_awaits(self):
    """Rank 2 may still receive what is sent to it, but nobody waits for that."""
    if self.rank == 2:
        time.sleep(600)
    else:
        self.work = dist.isend(ones(), 2)
        dist.recv(ones(), 1 - self.rank)


@fault(
    "error", "rank 0 waits in the default group (recv #1 from rank 1", "(all_reduce #1", "for rank 0", bases=("fresh",)
)
def receive_against_all_reduce(self):
    if self.rank == 0:
        dist.recv(ones(), 1)
    dist.all_reduce(ones())
    if self.rank == 1:
        dist.send(ones(), 0)


@fault("error", "rank 1 left without sending; rank 0 is waiting in recv #1 from rank 1", bases=PROCESSES)
def receive_from_a_rank_that_returned(self):
    if self.rank == 0:
        dist.recv(ones(), 1)


@fault("error", "rank 1 of 3 raised", "ValueError: no such layer", "rank 1 raised without sending; ", bases=("fresh",))
def receive_from_a_rank_that_raised(self):
    if self.rank == 1:
        raise ValueError("no such layer")
    if self.rank == 0:
        dist.recv(ones(), 1)


@fault("error", "left without sending; rank 0 is waiting in recv #1 from any rank", bases=("fresh",))
def receive_from_any_rank(self):
    if self.rank == 0:
        dist.recv(ones())


def _exchange(rank: int) -> None:
    """Messages between ranks 0 and 1, which torch's recorder leaves out."""
    if rank == 0:
        dist.send(ones(), 1)
    elif rank == 1:
        dist.recv(ones(), 0)


@fault("error", "rank 0 waits in group dp (all_reduce #1", "for rank 1, which waits in group tp", bases=PROCESSES)
def opposite_order_after_messages(self):
    _exchange(self.rank)
    opposite_order_of_two_groups(self)


@fault("error", "rank 0 waits in group dp (all_reduce #1", "for rank 1, which waits in group tp", bases=("fresh",))
def opposite_order_of_async_collectives_after_messages(self):
    dp, tp = _two_groups()
    _exchange(self.rank)
    if self.rank < 2:
        for group in (dp, tp) if self.rank == 0 else (tp, dp):
            self.work = dist.all_reduce(ones(), group=group, async_op=True)
            self.work.wait()


@fault(
    "error", "rank 0 waits in group ", "for rank 1, which waits in group", "for rank 2, which waits", bases=("fresh",)
)
def three_groups_in_a_ring_after_messages(self):
    _exchange(self.rank)
    three_groups_in_a_ring(self)


@fault(
    "error",
    "rank 0 waits in group 1 (all_reduce #1, line ",
    "for rank 1, which waits in group 2",
    "for rank 0",
    bases=("threaded",),
)
def opposite_order_of_two_groups_of_threads(self):
    opposite_order_of_two_groups(self)


@fault(
    "error",
    "rank 0 waits in group dp (all_reduce #1, line ",
    "for rank 1, which waits in group tp",
    "for rank 0",
    bases=PROCESSES,
)
def opposite_order_of_async_collectives(self):
    dp, tp = _two_groups()
    if self.rank < 2:
        for group in (dp, tp) if self.rank == 0 else (tp, dp):
            work = dist.all_reduce(ones(), group=group, async_op=True)
            work.wait()


@fault("error", "rank 0 waits in group ", "for rank 1, which waits in group", "for rank 2, which waits", "for rank 0")
def three_groups_in_a_ring(self):
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    mine = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[self.rank]
    for number in mine:
        dist.all_reduce(ones(), group=groups[number])


@fault(
    "error", "rank 0 waits in group dp (all_reduce #1, line ", "for rank 1, which waits in group tp", bases=("fresh",)
)
def opposite_order_in_company(self):
    """A thread issues the collectives, another one sleeps, one waits for work, and a child process lives."""
    dp, tp = (dist.new_group([0, 1], group_desc=name) for name in ("dp", "tp"))
    if self.rank == 2:
        return

    def beat():
        while True:
            time.sleep(0.1)

    def train():
        for group in (dp, tp) if self.rank == 0 else (tp, dp):
            dist.all_reduce(ones(), group=group)

    threading.Thread(target=beat, daemon=True).start()
    idle = ThreadPoolExecutor(1)
    idle.submit(int).result()
    with subprocess.Popen(["sleep", "1000"]) as child:
        try:
            if self.rank == 0:
                train()
            else:
                child.send_signal(signal.SIGKILL)
                child.wait()
                threading.Thread(target=train).run()
        finally:
            child.kill()


def patient_store():
    """A wait that the time-out of the store ends before the test does is no deadlock."""
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=2000))
    return store


@fault("failed", "rank 1 creates a group of ranks 1, 2, but ranks 0, 2 create one of", "new_group #1", bases=("fresh",))
def groups_made_in_another_order(self):
    patient_store()
    for members in ([1, 2], [0, 1]) if self.rank == 1 else ([0, 1], [1, 2]):
        dist.new_group(members)


@fault(
    "error",
    "rank 1 waits for the key 'never' of a store (line ",
    "), which nobody sets; ranks 0, 2 wait in all_reduce #1",
    "waiting for the key 'never' of a store",
    bases=("fresh",),
)
def key_that_nobody_sets(self):
    store = patient_store()
    if self.rank == 1:
        store.get("never")
    dist.all_reduce(ones())


@fault(
    "error", "rank 1 waits for the keys 'from rank 0', 'other' of a store (line ", "ranks 0, 2 wait", bases=("fresh",)
)
def keys_that_nobody_sets(self):
    store = patient_store()
    if self.rank == 1:
        before = self.rank - 1
        store.wait([f"from rank {before}", "other"])
    dist.all_reduce(ones())


@fault("error", "rank 2 waits for the key 'peer' of a store (line ", "ranks 0, 1 wait", bases=("fresh",))
def key_that_nobody_sets_with_a_timeout(self):
    store = patient_store()
    if self.rank == 2:
        store.wait(["ready", "peer"], timedelta(seconds=1500))
    store.set("ready", "")
    dist.barrier()


@fault(
    "error",
    "rank 0 waits for the key '-1' of a store (line ",
    "), rank 1 waits for the key '0' of a store",
    "), which nobody sets",
    bases=("fresh",),
)
def keys_that_others_set_too_late(self):
    store = patient_store()
    store.get(f"{self.rank - 1}")
    store.set(f"{self.rank}", "")


@fault(
    "error",
    "rank 1 waits for the key 'torchelastic/nobody/last_member' of a store",
    "which nobody sets; ranks 0, 2 wait in",
    bases=("fresh",),
)
def barrier_of_a_store_that_others_leave_out(self):
    from torch.distributed.elastic.utils.store import barrier

    store = patient_store()
    if self.rank == 1:
        barrier(store, WORLD_SIZE, "torchelastic/nobody", barrier_timeout=2000)
    dist.all_reduce(ones())


# -- waits for something of the own process, beside a collective


def in_own_process(*texts: str, bases: tuple[str, ...] = PROCESSES) -> Callable[[Any], Any]:
    waits = "waits for a lock, a queue, an event or a thread of its own (line "
    others = "), which nothing in the process ends; ranks 0, 2 wait in all_reduce #1"
    return fault("error", f"rank 1 {waits}", others, *texts, bases=bases)


@in_own_process("waiting for a lock, a queue, an event or a thread of its own")
def lock_that_nobody_releases(self):
    lock = threading.Lock()
    lock.acquire()
    if self.rank == 1:
        with lock:
            pass
    dist.all_reduce(ones())


@in_own_process()
def queue_that_nobody_fills(self):
    if self.rank == 1:
        queue.Queue().get()
    dist.all_reduce(ones())


@in_own_process()
def event_that_a_callback_does_not_set(self):
    """The call that would set it lacks the others, which wait in another group."""
    group = dist.new_group([0, 1, 2], group_desc="dp")
    is_over = threading.Event()
    if self.rank == 1:
        work = dist.all_reduce(ones(), group=group, async_op=True)
        work.get_future().add_done_callback(lambda _: is_over.set())
        is_over.wait()
    dist.all_reduce(ones())


@in_own_process()
def thread_that_waits_for_another_one(self):
    if self.rank == 1:
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        thread.join()
    dist.all_reduce(ones())


@fault(
    "error", "ranks 0, 2 left without setting the key 'never' of a store; rank 1 is waiting for it", bases=("fresh",)
)
def key_that_ranks_have_not_set(self):
    store = patient_store()
    if self.rank == 1:
        store.get("never")


@fault(
    "error",
    "rank 0 waits in the default group (all_reduce #1, line ",
    "for rank 1, which waits in group dp",
    "for rank 0",
    bases=PROCESSES,
)
def subgroup_against_the_default_group(self):
    group = dist.new_group([0, 1], group_desc="dp")
    if self.rank == 1:
        dist.all_reduce(ones(), group=group)
    dist.all_reduce(ones())
    if self.rank == 0:
        dist.all_reduce(ones(), group=group)


# -- while another rank computes


def _compute() -> None:
    """The parent ends this rank long before."""
    end = time.process_time() + 60
    while time.process_time() < end:
        sum(range(1000))


@fault("failed", "rank 0 calls all_reduce [4] float32, rank 1 calls broadcast [4] float32", bases=PROCESSES)
def mismatch_while_one_computes(self):
    if self.rank == 2:
        _compute()
    elif self.rank == 1:
        dist.broadcast(ones(), 0)
    dist.all_reduce(ones())


@fault("error", "rank 0 waits in group dp", "for rank 1, which waits in group tp", "for rank 0", bases=PROCESSES)
def opposite_order_while_one_computes(self):
    dp, tp = _two_groups()
    if self.rank == 2:
        _compute()
    for group in (dp, tp) if self.rank == 0 else (tp, dp):
        dist.all_reduce(ones(), group=group)


# -- what issues the collectives for the program


@fault("failed", "ranks disagree in call #", bases=PROCESSES)
def ddp_of_different_models(self):
    model = torch.nn.Linear(4, 4).to(torch.float64 if self.rank == 1 else torch.float32)
    replica = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
    replica(torch.ones(2, 4, dtype=model.weight.dtype)).sum().backward()


@fault("failed", "ranks disagree in call #1", "rank 1 calls all_gather [8] float16", bases=("fresh",))
def fsdp_of_different_types(self):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 6, bias=False, dtype=torch.float16 if self.rank == 1 else torch.bfloat16)
    fully_shard(model, mesh=mesh_of_ranks())
    model.unshard()


@fault("failed", "ranks disagree in call #", "int32", bases=PROCESSES)
def functional_collective(self):
    import torch.distributed._functional_collectives as functional

    functional.all_reduce(ones(dtype=type_of(self.rank)), "sum", dist.group.WORLD).sum().item()


@fault("failed", "ranks disagree in call #", "int32", bases=PROCESSES)
def compiled_collective(self):
    @torch.compile(backend="aot_eager", fullgraph=False)
    def step(tensor):
        dist.all_reduce(tensor)
        return tensor + 1

    step(ones(dtype=type_of(self.rank)))


@fault("failed", "ranks disagree in call #", bases=PROCESSES)
def dtensor_of_different_types(self):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = mesh_of_ranks()
    local = torch.ones(2, 2, dtype=type_of(self.rank))
    DTensor.from_local(local, mesh, [Shard(0)], run_check=False).redistribute(placements=[Replicate()]).to_local()
