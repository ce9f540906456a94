"""Programs with a slip in calls that torch's recorders know only in part: roots and monitored barriers."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from kit.early_looks import TWO_LOOKS
from kit.told import Programs

PROGRAMS = Programs(__name__)
told, quiet = PROGRAMS.told, PROGRAMS.quiet


def other_root(test):
    """The root that rank 1 has in mind, and that of the others."""
    return 1 if test.rank == 1 else 0


def parts_at(test, root):
    """A tensor for each rank, at the root only."""
    return [torch.ones(4) for _ in range(test.world_size)] if test.rank == root else None


# -- another root


@told("rank 1 calls broadcast [4] float32 root 1, the others call broadcast [4] float32 root 0 in call #1")
def broadcast(self):
    dist.broadcast(torch.ones(4), other_root(self))  # rank 1


@told("rank 1 calls reduce [4] float32", "root 1, the others call reduce [4] float32", "root 0 in call #1")
def reduce(self):
    dist.reduce(torch.ones(4), other_root(self))  # rank 1


@told("rank 1 calls gather [4] float32 root 1, the others call gather [4] float32 root 0 in call #1")
def gather(self):
    root = other_root(self)
    dist.gather(torch.ones(4), parts_at(self, root), dst=root)  # rank 1


@told("rank 1 calls scatter into [4] float32 root 1, the others call scatter into [4] float32 root 0 in call #1")
def scatter(self):
    root = other_root(self)
    dist.scatter(torch.ones(4), parts_at(self, root), src=root)  # rank 1


@told("rank 0 calls gather [4] float32 root 1, rank 1 calls gather [4] float32 root 2, rank 2", "root 0 in call #1")
def nobody_takes_what_all_give(self):
    dist.gather(torch.ones(4), None, dst=(self.rank + 1) % 3)  # rank 0


@told("rank 1 calls broadcast [1] int64 root 1, the others call broadcast [1] int64 root 0 in call #1")
def objects_of_another(self):
    dist.broadcast_object_list([self.rank], other_root(self))  # rank 1


@told("rank 1 calls gather [5] uint8 root 1, the others call gather [5] uint8 root 0 in call #2")
def objects_for_another(self):
    root = other_root(self)
    dist.gather_object(self.rank, [None] * 3 if self.rank == root else None, dst=root)  # rank 1


@told("rank 1 calls broadcast [1] int64 root 1, the others call broadcast [1] int64 root 0 in call #1")
def an_object_of_another_for_each(self):
    root = other_root(self)
    dist.scatter_object_list([None], [1, 2, 3] if self.rank == root else None, src=root)  # rank 1


@told("rank 1 calls broadcast [4] float32 root 0, rank 2 calls broadcast [4] float32 root 1 in call #1 of group tail")
def broadcast_in_a_subgroup(self):
    """The root counts by its place in the group."""
    group = dist.new_group([1, 2], group_desc="tail")
    if self.rank:
        dist.broadcast(torch.ones(4), self.rank, group=group)  # rank 1
    dist.barrier()


@told("rank 1 calls broadcast [100000] float32 root 1", "in call #4 of the default group")
def the_last_layer(self):
    """The rank that leaves first has lost nobody."""
    for layer in range(4):
        root = other_root(self) if layer == 3 else 0
        dist.broadcast(torch.ones(100_000), root)  # rank 1


@told("rank 1 calls broadcast [4] float32 root 1, the others call broadcast [4] float32 root 0 in call #1")
def broadcast_at_once(self):
    works = [dist.broadcast(torch.ones(4), other_root(self), async_op=True) for _ in range(3)]  # rank 1
    for work in works:
        work.wait()


@told("rank 1 calls reduce [4] float32", "root 1, the others call reduce [4] float32", "root 0 in call #1")
def reduce_in_a_thread(self):
    """Another thread is in a call of its own group."""
    group = dist.new_group([0, 1, 2])
    threads = [
        threading.Thread(target=dist.reduce, args=(torch.ones(4), other_root(self))),  # rank 1
        threading.Thread(target=dist.all_reduce, args=(torch.ones(4),), kwargs={"group": group}),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier(group=group)


@told("rank 1 calls broadcast [4] float32 root 1, the others call broadcast [4] float32 root 0 in call #1")
def broadcast_by_the_group(self):
    """With a root in the place of options."""
    dist.group.WORLD.broadcast(torch.ones(4), root=other_root(self)).wait()  # rank 1


# -- a monitored barrier


@told("rank 1 calls all_reduce [4] float32", "the others call monitored_barrier in call #1 of the default group")
def all_reduce_against_monitored_barrier(self):
    if self.rank == 1:
        dist.all_reduce(torch.ones(4))  # rank 1
    else:
        dist.monitored_barrier()  # ranks 0, 2


@told("rank 0 calls barrier, the others call monitored_barrier in call #2 of the default group")
def barrier_of_the_first_rank(self):
    """It is the one that serves the others."""
    dist.monitored_barrier()
    if self.rank == 0:
        dist.barrier()  # rank 0
    else:
        dist.monitored_barrier()  # ranks 1, 2


@told("rank 0 waits in group side (all_reduce #1", "for rank 1, which waits in the default group (monitored_barrier #1")
def opposite_order_with_a_monitored_barrier(self):
    group = dist.new_group([0, 1, 2], group_desc="side")
    if self.rank == 1:
        dist.monitored_barrier()  # rank 1
    dist.all_reduce(torch.ones(4), group=group)  # ranks 0, 2
    if self.rank != 1:
        dist.monitored_barrier()


@told("rank 0 waits", "recv #1 from rank 1", "for rank 1", "recv #1 from rank 0", size=2)
def receives_after_a_monitored_barrier(self):
    dist.monitored_barrier()
    dist.recv(torch.ones(4), 1 - self.rank)  # rank 0


@told("rank 1 left before monitored_barrier #2; ranks 0, 2 are waiting in it")
def one_monitored_barrier_less(self):
    dist.monitored_barrier()
    if self.rank != 1:
        dist.monitored_barrier()  # ranks 0, 2


# -- sound


@quiet()
def each_is_the_root_in_turn(self):
    works = [dist.broadcast(torch.ones(4), root, async_op=True) for root in (0, 1, 2, 1, 0)]
    for root in range(3):
        dist.reduce(torch.ones(4), root)
        dist.gather(torch.ones(4), parts_at(self, root), dst=root)
        dist.scatter(torch.ones(4), parts_at(self, root), src=root)
    for work in works:
        work.wait()


@quiet(size=4)
def roots_of_like_groups(self):
    """The root has another number in each group, and the same place."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    first = self.rank // 2 * 2
    dist.broadcast(torch.ones(4), first, group=pairs[self.rank // 2])
    dist.broadcast(torch.ones(4), group=pairs[self.rank // 2], group_src=1)
    dist.reduce(torch.ones(4), first + 1, group=pairs[self.rank // 2])


@quiet()
def threads_with_roots_of_their_own(self):
    groups = [dist.new_group([0, 1, 2]) for _ in range(3)]

    def run(root):
        for _ in range(10):
            dist.broadcast(torch.ones(4), root, group=groups[root])

    threads = [threading.Thread(target=run, args=(root,)) for root in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@quiet(size=2)
def a_root_that_only_one_knows(self):
    """What C++ issues shows no root."""
    group = dist.group.WORLD
    if self.rank == 0:
        dist._broadcast_coalesced(group, [torch.ones(4)], 1 << 20, 1)
    else:
        dist.broadcast(torch.ones(4), 1)
    dist.broadcast(torch.ones(4), 0)


@quiet()
def late_to_a_monitored_barrier(self):
    dist.monitored_barrier()
    if self.rank == 1:
        time.sleep(TWO_LOOKS)
    dist.monitored_barrier(wait_all_ranks=True)
    dist.all_reduce(torch.ones(4))


@quiet(size=2)
def messages_between_monitored_barriers(self):
    for _ in range(2):
        dist.monitored_barrier()
        if self.rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(4), 0)
        dist.monitored_barrier()
        dist.all_reduce(torch.ones(4))


@quiet(size=2)
def a_monitored_barrier_that_times_out(self):
    """Rank 1 is somewhere else, as the test wants it."""
    store = dist.distributed_c10d._get_default_store()
    if self.rank == 0:
        with self.assertRaises(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=TWO_LOOKS))
        store.set("over", "")
    else:
        store.wait(["over"])
