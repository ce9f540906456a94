"""Programs whose main thread waits for one of its threads, which is in a collective that another rank leaves out."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import torch
import torch.distributed as dist
from kit.early_looks import TWO_LOOKS
from kit.told import Programs

PROGRAMS = Programs(__name__)
told, quiet = PROGRAMS.told, PROGRAMS.quiet
IN_A_RING = (
    "rank 0 waits in group b (all_reduce #1",
    "for rank 1, which waits in group a (all_reduce #1",
    "for rank 0",
)


def in_opposite_orders(test):
    """A function that issues in two groups, in another order on rank 1; the groups are made at once."""
    a, b = (dist.new_group([0, 1], group_desc=name) for name in "ab")

    def train():
        for group in (a, b) if test.rank else (b, a):
            dist.all_reduce(torch.ones(4), group=group)

    return train


@told(*IN_A_RING, size=2)
def a_thread_that_is_joined(self):
    thread = threading.Thread(target=in_opposite_orders(self))
    thread.start()
    thread.join()


@told(*IN_A_RING, size=2)
def a_pool(self):
    train = in_opposite_orders(self)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(train).result()


@told(*IN_A_RING, size=2)
def a_pool_that_is_left(self):
    train = in_opposite_orders(self)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(train)


@told(*IN_A_RING, size=2)
def futures_that_are_awaited(self):
    train = in_opposite_orders(self)
    with ThreadPoolExecutor(2) as pool:
        wait([pool.submit(train), pool.submit(int)])


@told(*IN_A_RING, size=2)
def an_event(self):
    train, is_over = in_opposite_orders(self), threading.Event()

    def run():
        train()
        is_over.set()

    threading.Thread(target=run, daemon=True).start()
    is_over.wait()


@told(*IN_A_RING, size=2)
def a_queue(self):
    train, results = in_opposite_orders(self), queue.Queue()
    threading.Thread(target=lambda: results.put(train()), daemon=True).start()
    results.get()


@told(*IN_A_RING, size=2)
def a_lock_of_a_thread(self):
    train, lock, has_begun = in_opposite_orders(self), threading.Lock(), threading.Event()

    def run():
        with lock:
            has_begun.set()
            train()

    threading.Thread(target=run, daemon=True).start()
    has_begun.wait()
    with lock:
        pass


@told(*IN_A_RING, size=2)
def asyncio_with_threads(self):
    train = in_opposite_orders(self)

    async def main():
        await asyncio.gather(asyncio.to_thread(train), asyncio.to_thread(int))

    asyncio.run(main())


@told(*IN_A_RING, size=2)
def a_thread_of_one_rank(self):
    train = in_opposite_orders(self)
    if self.rank == 0:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    else:
        train()


@told("waits in group stats (all_reduce #3", "for rank 1, which waits in the default group (barrier #4")
def a_reporter_that_reports_less(self):
    stats = dist.new_group([0, 1, 2], group_desc="stats")

    def report():
        for _ in range(2 if self.rank == 1 else 3):
            dist.all_reduce(torch.ones(2), group=stats)  # ranks 0, 2

    thread = threading.Thread(target=report)
    thread.start()
    for _ in range(3):
        dist.all_reduce(torch.ones(8))
    thread.join()
    dist.barrier()  # rank 1


@told("rank 0 waits in group checkpoint (", "for rank 1, which waits in the default group (barrier #", size=2)
def a_checkpoint_that_a_rank_leaves_out(self):
    import torch.distributed.checkpoint as dcp

    side = dist.new_group(backend="gloo", group_desc="checkpoint")
    folder = f"{self.file_name}.checkpoint"
    if self.rank == 0:
        dcp.async_save({"m": torch.ones(4)}, checkpoint_id=folder, process_group=side).result()  # rank 0
    dist.barrier()  # rank 1


@told(
    "rank 0 waits in the default group (all_reduce #1", "for rank 1, which waits in group loader (broadcast #2", size=2
)
def a_loader_that_broadcasts_once_more(self):
    group, batches = dist.new_group(group_desc="loader"), queue.Queue()

    def load():
        for _ in range(1 + self.rank):
            batch = torch.ones(4)
            dist.broadcast(batch, 0, group=group)  # rank 1
            batches.put(batch)

    threading.Thread(target=load, daemon=True).start()
    for _ in range(1 + self.rank):
        batches.get()
    dist.all_reduce(torch.ones(4))  # rank 0


@told("ranks 0, 1 wait for the key", "in all_reduce #1", levels=(1,))
def a_key_and_a_thread(self):
    if self.rank == 2:
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2)))
        thread.start()
        thread.join()
    else:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=2000))
        store.get("never")


# -- threads that have no line of the program


def groups_in_opposite_orders(test):
    groups = [dist.new_group([0, 1], group_desc=name) for name in "ab"]
    return groups if test.rank else groups[::-1]


@told(*IN_A_RING, size=2, levels=(1,))
def a_pool_that_runs_functions_of_torch(self):
    groups = groups_in_opposite_orders(self)
    with ThreadPoolExecutor(1) as pool:
        calls = [pool.submit(dist.all_reduce, torch.ones(4), group=group) for group in groups]
        wait(calls)  # rank 0


@told(*IN_A_RING, size=2, levels=(1,))
def a_thread_that_runs_a_function_of_torch(self):
    for group in groups_in_opposite_orders(self):
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(4),), kwargs={"group": group})
        thread.start()
        thread.join()  # rank 1


@told(*IN_A_RING, size=2, levels=(1,))
def asyncio_that_runs_functions_of_torch(self):
    groups = groups_in_opposite_orders(self)

    async def main():
        for group in groups:
            await asyncio.to_thread(dist.all_reduce, torch.ones(4), group=group)

    asyncio.run(main())  # rank 0


@told("rank 2 left before all_gather #1 of group checkpoint", "waiting in it", levels=(1,))
def a_checkpoint_without_a_rank_that_ends(self):
    import torch.distributed.checkpoint as dcp

    side = dist.new_group(backend="gloo", group_desc="checkpoint")
    if self.rank != 2:
        saving = dcp.async_save({"m": torch.ones(4)}, checkpoint_id=f"{self.file_name}.checkpoint", process_group=side)
        saving.result()  # ranks 0, 1


# -- sound


@quiet(size=2)
def threads_that_take_turns(self):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            [one.result() for one in [pool.submit(dist.all_reduce, torch.ones(4), group=group) for group in groups]]


@quiet(size=2)
def a_thread_that_comes_late(self):
    """Rank 1's thread goes on by itself, after the parent has looked more than twice."""
    go_on = threading.Event()

    def train():
        go_on.wait(TWO_LOOKS if self.rank else 0)
        dist.all_reduce(torch.ones(4))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


@quiet(size=2)
def asyncio_that_goes_on_by_a_timer(self):
    async def main():
        if self.rank:
            await asyncio.sleep(TWO_LOOKS)
        await asyncio.to_thread(dist.all_reduce, torch.ones(4))

    asyncio.run(main())


@quiet(size=2)
def asyncio_that_a_socket_wakes(self):
    """A thread writes to it that waits for a timer of its own."""
    import socket

    async def main():
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        if self.rank:
            timer = threading.Timer(TWO_LOOKS, lambda: theirs.send(b"x"))
            timer.start()
            await asyncio.get_running_loop().sock_recv(ours, 1)
        await asyncio.to_thread(dist.all_reduce, torch.ones(4))
        ours.close()
        theirs.close()

    asyncio.run(main())


@quiet(size=2)
def an_asynchronous_checkpoint(self):
    import torch.distributed.checkpoint as dcp

    side = dist.new_group(backend="gloo")
    folder = f"{self.file_name}.checkpoint"
    saving = dcp.async_save({"m": torch.ones(4)}, checkpoint_id=folder, process_group=side)
    dist.all_reduce(torch.ones(4))
    saving.result()


@quiet(size=2)
def a_loader_with_a_queue(self):
    group, batches = dist.new_group(), queue.Queue(1)

    def load():
        for _ in range(5):
            batch = torch.ones(4)
            dist.broadcast(batch, 0, group=group)
            batches.put(batch)

    loader = threading.Thread(target=load)
    loader.start()
    for _ in range(5):
        dist.all_reduce(batches.get())
    loader.join()
