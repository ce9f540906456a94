"""Programs whose ranks issue collectives in helpers of the standard library and of torch; the main thread waits."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing.pool import ThreadPool

import torch
import torch.distributed as dist
from kit.early_looks import TWO_LOOKS
from kit.told import Programs
from told_threads import IN_A_RING, in_opposite_orders

PROGRAMS = Programs(__name__)
told, quiet = PROGRAMS.told, PROGRAMS.quiet


@told(*IN_A_RING, size=2)
def a_map_of_a_pool(self):
    train = in_opposite_orders(self)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda step: train(), range(1)))


@told(*IN_A_RING, size=2)
def futures_as_they_complete(self):
    train = in_opposite_orders(self)
    with ThreadPoolExecutor(2) as pool:
        for done in as_completed([pool.submit(int), pool.submit(train)]):
            done.result()


@told(*IN_A_RING, size=2)
def a_pool_of_multiprocessing(self):
    train = in_opposite_orders(self)
    with ThreadPool(2) as pool:
        pool.apply(train)


@told(*IN_A_RING, size=2)
def a_condition(self):
    train, condition, results = in_opposite_orders(self), threading.Condition(), []

    def run():
        train()
        with condition:
            results.append(1)
            condition.notify_all()

    threading.Thread(target=run, daemon=True).start()
    with condition:
        condition.wait_for(lambda: results)


@told(*IN_A_RING, size=2)
def a_barrier_of_threads(self):
    train, meet = in_opposite_orders(self), threading.Barrier(2)
    threading.Thread(target=lambda: (train(), meet.wait()), daemon=True).start()
    meet.wait()


@told(*IN_A_RING, size=2)
def a_semaphore(self):
    train, slots, has_begun = in_opposite_orders(self), threading.BoundedSemaphore(1), threading.Event()

    def run():
        with slots:
            has_begun.set()
            train()

    threading.Thread(target=run, daemon=True).start()
    has_begun.wait()
    with slots:
        pass


@told(*IN_A_RING, size=2)
def a_queue_whose_work_is_done(self):
    train, tasks = in_opposite_orders(self), queue.Queue()

    def run():
        tasks.get()()
        tasks.task_done()

    threading.Thread(target=run, daemon=True).start()
    tasks.put(train)
    tasks.join()


@told(*IN_A_RING, size=2)
def a_full_queue(self):
    """The consumer is in a collective, and the producer has no room."""
    train, batches = in_opposite_orders(self), queue.Queue(1)

    def consume():
        batches.get()
        train()
        batches.get()

    threading.Thread(target=consume, daemon=True).start()
    for batch in range(3):
        batches.put(batch)


@told(*IN_A_RING, size=2)
def a_future_of_torch(self):
    """C++ waits."""
    train, result = in_opposite_orders(self), torch.futures.Future()
    threading.Thread(target=lambda: (train(), result.set_result(1)), daemon=True).start()
    result.wait()


@told(*IN_A_RING, size=2)
def a_future_of_its_own(self):
    train, result = in_opposite_orders(self), Future()
    threading.Thread(target=lambda: result.set_result(train()), daemon=True).start()
    result.result()


@told(*IN_A_RING, size=2)
def a_pool_behind_a_pool(self):
    """A thread waits for a thread."""
    train = in_opposite_orders(self)
    with ExitStack() as stack:
        outer, inner = (stack.enter_context(ThreadPoolExecutor(1)) for _ in range(2))
        outer.submit(lambda: inner.submit(train).result()).result()


@told(*IN_A_RING, size=2)
def an_executor_of_asyncio(self):
    train = in_opposite_orders(self)

    async def main():
        loop, done = asyncio.get_running_loop(), asyncio.Queue()
        call = loop.run_in_executor(None, functools.partial(train))
        call.add_done_callback(done.put_nowait)
        await done.get()

    asyncio.run(main())


@told(*IN_A_RING, size=2)
def a_loop_in_a_thread(self):
    train, loop = in_opposite_orders(self), asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def run():
        await asyncio.to_thread(train)

    asyncio.run_coroutine_threadsafe(run(), loop).result()


@told(*IN_A_RING, size=2)
def a_loop_that_is_blocked_by_a_coroutine(self):
    train = in_opposite_orders(self)

    async def main():
        train()

    asyncio.run(main())


@told("rank 0 waits in group b (all_reduce #1", "for rank 1, which waits in group a (all_reduce #1", size=2)
def two_threads_that_cross(self):
    """Each issues in one group, and on one rank the second begins when the first is over."""
    groups = [dist.new_group([0, 1], group_desc=name) for name in "ab"]
    threads = [
        threading.Thread(target=dist.all_reduce, args=(torch.ones(4),), kwargs={"group": group})
        for group in (groups if self.rank else groups[::-1])
    ]
    for thread in threads:
        thread.start()
        thread.join()


@told("rank 1 calls all_reduce [3] int32", "the others call all_reduce [3] float32", "in call #1 of group metrics")
def a_type_in_a_pool(self):
    group = dist.new_group(group_desc="metrics")
    mine = torch.ones(3, dtype=torch.int32 if self.rank == 1 else torch.float32)
    with ThreadPoolExecutor(1, thread_name_prefix="metrics") as pool:
        pool.submit(lambda: dist.all_reduce(mine, group=group)).result()  # rank 1
    dist.barrier()


@told("rank 2 calls barrier", "the others call all_gather", "in call #1 of group loader")
def an_iterator_that_looks_ahead(self):
    group = dist.new_group(group_desc="loader")

    def ahead(batches, depth=1):
        ready = queue.Queue(depth)

        def fill():
            for batch in batches:
                ready.put(batch)
            ready.put(None)

        threading.Thread(target=fill, daemon=True).start()
        yield from iter(ready.get, None)

    def batches():
        for _ in range(2):
            if self.rank == 2:
                dist.barrier(group=group)  # rank 2
            dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2), group=group)  # ranks 0, 1
            yield torch.ones(2)

    for batch in ahead(batches()):
        dist.all_reduce(batch)


@told("rank 0 waits in group checkpoint (", "for rank 1, which waits in the default group (all_reduce #1", size=2)
def one_checkpoint_more(self):
    import torch.distributed.checkpoint as dcp

    side = dist.new_group(backend="gloo", group_desc="checkpoint")
    for step in range(2 if self.rank == 0 else 1):
        folder = f"{self.file_name}.{step}"
        dcp.async_save({"m": torch.ones(4)}, checkpoint_id=folder, process_group=side).result()
    dist.all_reduce(torch.ones(4))  # rank 1


@told("rank 1 left before all_reduce #2 of group health; rank 0 is waiting in it", size=2)
def a_heartbeat_that_ends(self):
    group = dist.new_group(group_desc="health")

    def beat():
        for _ in range(1 + (self.rank == 0)):
            dist.all_reduce(torch.ones(1), group=group)  # rank 0

    thread = threading.Thread(target=beat, name="heartbeat")
    thread.start()
    thread.join()


# -- sound


def in_order(test, seconds=0.0):
    """A function that issues in two groups, in the same order, and late on rank 1."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def train():
        time.sleep(seconds * test.rank)
        for group in groups:
            dist.all_reduce(torch.ones(4), group=group)

    return train


@quiet(size=2)
def pools_of_all_kinds(self):
    train = in_order(self)
    with ThreadPoolExecutor(1) as pool, ThreadPool(1) as other:
        list(pool.map(lambda step: train(), range(3)))
        for done in as_completed([pool.submit(train)]):
            done.result()
        other.apply(train)
        pool.submit(lambda: other.apply(train)).result()


@quiet(size=2)
def a_late_pool(self):
    train = in_order(self, TWO_LOOKS)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train).result()


@quiet(size=2)
def a_late_pool_of_multiprocessing(self):
    train = in_order(self, TWO_LOOKS)
    with ThreadPool(2) as pool:
        pool.apply(train)


@quiet(size=2)
def a_loop_with_a_timer_in_a_thread(self):
    """Nothing but the timer makes rank 1 go on."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def run():
        await asyncio.sleep(TWO_LOOKS * self.rank)
        dist.all_reduce(torch.ones(4))

    asyncio.run_coroutine_threadsafe(run(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@quiet(size=2)
def a_late_future_of_torch(self):
    train, result = in_order(self, TWO_LOOKS), torch.futures.Future()
    threading.Thread(target=lambda: (train(), result.set_result(1))).start()
    result.wait()


@quiet(size=2)
def a_late_condition(self):
    train, condition, results = in_order(self, TWO_LOOKS), threading.Condition(), []

    def run():
        train()
        with condition:
            results.append(1)
            condition.notify_all()

    threading.Thread(target=run).start()
    with condition:
        condition.wait_for(lambda: results)


@quiet(size=2)
def a_late_loop_in_a_thread(self):
    train, loop = in_order(self, TWO_LOOKS), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def run():
        await asyncio.to_thread(train)

    asyncio.run_coroutine_threadsafe(run(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@quiet(size=2)
def queues_of_a_consumer(self):
    train, batches = in_order(self), queue.Queue(1)

    def consume():
        for _ in range(4):
            batches.get()()
            batches.task_done()

    thread = threading.Thread(target=consume)
    thread.start()
    for _ in range(4):
        batches.put(train)
    batches.join()
    thread.join()


@quiet(size=2)
def a_callback_that_issues(self):
    """The second collective begins where the first one ends."""
    group, is_over = dist.new_group(), threading.Event()

    def then(_):
        dist.all_reduce(torch.ones(4), group=group)
        is_over.set()

    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.get_future().add_done_callback(then)
    is_over.wait()
    work.wait()


@quiet(size=2)
def a_heartbeat(self):
    group, stop = dist.new_group(), threading.Event()

    def beat():
        all_stop = torch.zeros(1)
        while not all_stop.item():
            all_stop.fill_(stop.is_set())
            dist.all_reduce(all_stop, dist.ReduceOp.MAX, group=group)
            time.sleep(0.01)

    thread = threading.Thread(target=beat)
    thread.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(4))
    if self.rank == 0:
        stop.set()
    thread.join()


@quiet(size=2)
def a_metric_beside_a_long_step(self):
    group = dist.new_group()
    with ThreadPoolExecutor(1) as pool:
        metric = pool.submit(lambda: dist.all_reduce(torch.ones(1), group=group))
        if self.rank:
            time.sleep(TWO_LOOKS)
        dist.barrier()
        metric.result()


@quiet(size=2)
def two_checkpoints(self):
    import torch.distributed.checkpoint as dcp

    side = dist.new_group(backend="gloo")
    for step in range(2):
        folder = f"{self.file_name}.{step}"
        saving = dcp.async_save({"m": torch.ones(4)}, checkpoint_id=folder, process_group=side)
        dist.all_reduce(torch.ones(4))
        saving.result()


@quiet(size=2)
def a_timer_that_reports(self):
    group = dist.new_group()
    timer = threading.Timer(0.2 + TWO_LOOKS * self.rank, lambda: dist.all_reduce(torch.ones(1), group=group))
    timer.start()
    timer.join()
