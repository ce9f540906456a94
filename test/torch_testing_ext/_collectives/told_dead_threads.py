"""Programs in which a thread dies of a collective, and nobody asks for its exception."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from kit.told import Programs

PROGRAMS = Programs(__name__)
told, quiet = PROGRAMS.told, PROGRAMS.quiet


def in_thread(call, *args, **options):
    thread = threading.Thread(target=call, args=args, **options)
    thread.start()
    thread.join()


def without_the_last_rank(test):
    """Whether this rank goes on; the last one has the group, and leaves."""
    dist.barrier()
    return test.rank < 2


@told("rank 2 left before all_reduce #1; ranks 0, 1 are waiting in it")
def a_metric(self):
    if self.rank < 2:
        in_thread(lambda: dist.all_reduce(torch.ones(4)))  # ranks 0, 1


@told("rank 2 left before broadcast #2; ranks 0, 1 are waiting in it")
def a_loader(self):
    if without_the_last_rank(self):
        in_thread(lambda: dist.broadcast(torch.ones(4), 2), name="loader")  # ranks 0, 1


@told("rank 2 left before all_reduce #2; ranks 0, 1 are waiting in it")
def a_daemon(self):
    if without_the_last_rank(self):
        in_thread(lambda: dist.all_reduce(torch.ones(4)), daemon=True)  # ranks 0, 1


@told("rank 2 left before all_reduce #2; ranks 0, 1 are waiting in it")
def a_timer(self):
    if without_the_last_rank(self):
        timer = threading.Timer(0, lambda: dist.all_reduce(torch.ones(4)))  # ranks 0, 1
        timer.start()
        timer.join()


@told("rank 2 left before all_reduce #2; ranks 0, 1 are waiting in it")
def a_class_of_thread(self):
    class Reporter(threading.Thread):
        def run(self):
            dist.all_reduce(torch.ones(4))  # ranks 0, 1

    if without_the_last_rank(self):
        reporter = Reporter()
        reporter.start()
        reporter.join()


@told("rank 2 left before all_reduce #2; ranks 0, 1 are waiting in it")
def a_work_that_a_thread_waits_for(self):
    if without_the_last_rank(self):
        work = dist.all_reduce(torch.ones(4), async_op=True)  # ranks 0, 1
        in_thread(lambda: work.wait())


@told("rank 2 left before all_gather #2 of group side", "waiting in it")
def a_group_of_the_thread(self):
    side = dist.new_group(group_desc="side")
    dist.barrier(side)
    if self.rank < 2:
        in_thread(lambda: dist.all_gather([torch.ones(2) for _ in range(3)], torch.ones(2), group=side))  # ranks 0, 1


@told("rank 1 left without sending; rank 0 is waiting in recv #1 from rank 1", size=2)
def a_receive(self):
    dist.barrier()
    if self.rank == 0:
        in_thread(lambda: dist.recv(torch.ones(4), 1))  # rank 0


@told("rank 2 left before ", "waiting in it")
def objects(self):
    if without_the_last_rank(self):
        in_thread(lambda: dist.all_gather_object([None] * 3, self.rank))  # ranks 0, 1


@told("rank 2 left before all_reduce #2; ranks 0, 1 are waiting in it")
def the_second_of_two_threads(self):
    if without_the_last_rank(self):
        in_thread(int)
        in_thread(lambda: dist.all_reduce(torch.ones(4)))  # ranks 0, 1


@told("rank 2 left before all_reduce #2; ranks 0, 1 are waiting in it")
def an_error_raised_for_another(self):
    def report():
        try:
            dist.all_reduce(torch.ones(4))  # ranks 0, 1
        except RuntimeError as error:
            raise ConnectionResetError(104, "the metrics are lost") from error

    if without_the_last_rank(self):
        in_thread(report)


@told("rank 1 left before monitored_barrier #1; rank 0 is waiting in it", size=2, levels=(1,))
def a_rank_that_comes_too_late(self):
    if self.rank == 0:
        in_thread(lambda: dist.monitored_barrier(timeout=timedelta(milliseconds=1)))
    store = dist.distributed_c10d._get_default_store()
    if self.rank == 0:
        store.set("over", "")
    else:
        store.wait(["over"])


@told("all 3 ranks raised RuntimeError: Split sizes", levels=(1,))
def arguments_that_torch_refuses(self):
    in_thread(lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1, 1], [1, 1, 5]))


# -- a thread that dies of something else, before its call


def counts_of(rank):
    return {0: 1, 2: 3}[rank]


DIED = "after thread reporter of rank 1 raised KeyError: 1 (told_dead_threads.py:"


# The chain begins at rank 0, or at rank 1 if that of rank 0 has not begun to wait.
@told(DIED, "waits in group stats (all_reduce #1")
def a_metric_that_a_rank_cannot_count(self):
    stats = dist.new_group(group_desc="stats")
    dist.barrier()
    in_thread(lambda: dist.all_reduce(torch.tensor([counts_of(self.rank)]), group=stats), name="reporter")
    dist.barrier()  # rank 1


@told(DIED, "rank 1 left before all_reduce #2; ranks 0, 2 are waiting in it")
def a_rank_that_leaves_then(self):
    dist.barrier()

    def report():
        counts_of(self.rank)
        dist.all_reduce(torch.ones(4))  # ranks 0, 2

    in_thread(report, name="reporter")


@told(DIED, "rank 1 calls barrier, the others call all_reduce [4] float32", "in call #1")
def another_call_then(self):
    def report():
        counts_of(self.rank)
        dist.all_reduce(torch.ones(4))  # ranks 0, 2

    in_thread(report, name="reporter")
    dist.barrier()  # rank 1


@told(
    "after thread loader of rank 1 raised ValueError: no batch (told_dead", "rank 1 waits for a lock, a queue", size=2
)
def a_queue_that_is_not_filled_then(self):
    batches = queue.Queue()

    def load():
        for step in range(2):
            if step == self.rank == 1:
                raise ValueError("no batch")
            batches.put(torch.ones(4))

    threading.Thread(target=load, name="loader", daemon=True).start()
    for _ in range(2):
        dist.all_reduce(batches.get())


# -- sound


@quiet()
def a_thread_that_catches(self):
    def report():
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(4))

    if without_the_last_rank(self):
        in_thread(report)


@quiet()
def a_pool_whose_error_is_asked_for(self):
    if without_the_last_rank(self):
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(dist.all_reduce, torch.ones(4)).exception()
        self.assertIsInstance(error, RuntimeError)


@quiet()
def a_thread_that_exits(self):
    in_thread(exit)
    dist.barrier()


@quiet()
def a_program_with_its_own_hook(self):
    seen = []
    threading.excepthook = seen.append
    if without_the_last_rank(self):
        in_thread(lambda: dist.all_reduce(torch.ones(4)))
        self.assertEqual(len(seen), 1)


@quiet()
def threads_that_all_ranks_have(self):
    for _ in range(3):
        in_thread(lambda: dist.all_reduce(torch.ones(4)))
