"""Programs in which ranks lose a peer, or wait for one, that has done nothing wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
from kit.told import Programs

PROGRAMS = Programs(__name__)
told, quiet = PROGRAMS.told, PROGRAMS.quiet


def pairs_of(test, names=("left", "right")):
    """The groups of neighbours."""
    return [dist.new_group([at, at + 1], group_desc=name) for at, name in enumerate(names)]


# -- a wrong group: the rank that has left is right


@told(
    "rank 2 waits in group right (all_reduce #1, line ",
    "for rank 1, which waits in group left (all_reduce #2, line ",
    "for rank 0, which has left",
)
def left_twice(self):
    left, right = pairs_of(self)
    if self.rank in (0, 1):
        dist.all_reduce(torch.ones(4), group=left)
    if self.rank == 1:
        dist.all_reduce(torch.ones(4), group=left)  # rank 1
    if self.rank == 2:
        dist.all_reduce(torch.ones(4), group=right)  # rank 2


@told("rank 3 waits in group c (barrier #1", "for rank 2, which waits in group b (all_reduce #1", "for rank 1", size=4)
def a_chain_of_three(self):
    a, b, c = pairs_of(self, "abc")
    if self.rank in (0, 1):
        dist.all_reduce(torch.ones(4), group=a)
    if self.rank == 1:
        dist.all_reduce(torch.ones(4), group=a)  # rank 1
    if self.rank == 2:
        dist.all_reduce(torch.ones(4), group=b)  # rank 2
    if self.rank == 3:
        dist.barrier(group=c)  # rank 3


@told("rank 1 left before all_reduce #2 of group mesh_tp; rank 0 is waiting in it", size=4)
def one_rank_of_a_mesh_leaves_out_a_call(self):
    """The other groups of the dimension have made the call: the rank that has left is wrong."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for step in range(2):
        if not (self.rank == 1 and step == 1):
            dist.all_reduce(torch.ones(4), group=mesh.get_group("tp"))  # rank 0
        if not (self.rank == 1 and step == 1):
            dist.all_reduce(torch.ones(4), group=mesh.get_group("dp"))


@told("rank 2 waits in group right (all_reduce #1", "for rank 1, which waits in the default group (recv #1 from rank 0")
def a_message_from_the_wrong_rank(self):
    _, right = pairs_of(self)
    if self.rank == 1:
        dist.recv(torch.empty(4), 0)  # rank 1
    if self.rank:
        dist.all_reduce(torch.ones(4), group=right)  # rank 2


# -- groups of other members


@told("rank 2 creates a group of ranks 0-2, but ranks 0, 1, 3 create one of ranks 0-3 in new_group #1", size=4)
def a_group_without_a_rank(self):
    group = dist.new_group([0, 1, 2] if self.rank == 2 else [0, 1, 2, 3])  # rank 2
    dist.all_reduce(torch.ones(4), group=group)


@told("ranks 0, 1 create a group of ranks 0, 1, but ranks 2, 3 create one of ranks 2, 3 in new_group #1", size=4)
def each_its_own_pair(self):
    group = dist.new_group([0, 1] if self.rank < 2 else [2, 3])  # ranks 0, 1
    dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


@told("rank 2 creates a group of ranks 1, 2, but ranks 0, 1 create one of ranks 0, 1 in new_group #1")
def groups_in_another_order(self):
    for members in ([1, 2], [0, 1]) if self.rank == 2 else ([0, 1], [1, 2]):
        group = dist.new_group(members)  # rank 2
    dist.all_reduce(torch.ones(1), group=group if self.rank else None)


# -- a mismatch that precedes an error


@told("rank 0 sends [2] int32 to rank 1, which receives [1] int64, in message #1", size=2)
def an_error_after_a_wrong_message(self):
    if self.rank == 0:
        dist.send(torch.tensor([2, 3], dtype=torch.int32), 1)  # rank 0
    else:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, 0)  # rank 1
        torch.empty(int(size) * 1_000_000_000)


@told("rank 1 calls all_reduce [4] int32", "in call #1 of the default group", size=2)
def an_assertion_after_a_wrong_type(self):
    mine = torch.ones(4, dtype=torch.int32 if self.rank else torch.float32)
    dist.all_reduce(mine)  # rank 1
    self.assertEqual(mine.tolist(), [2, 2, 2, 2])


@told("sends 8 elements to rank", "which expects 20, in call #1 of the default group", size=4, levels=(2,))
def a_capacity_of_one_rank(self):
    counts = [8 if self.rank == 2 else 20] * 4
    dist.all_to_all_single(torch.empty(80), torch.ones(sum(counts)), [20] * 4, counts)  # rank 2


@told("rank 1 of 2 raised ValueError: the reason", size=2)
def a_mismatch_in_a_finally(self):
    try:
        if self.rank == 1:
            raise ValueError("the reason")  # rank 1
        dist.all_reduce(torch.ones(4))
    finally:
        dist.barrier()


# -- ranks that only lost their peer


@told("ranks 0, 1, 3 lost rank 2, which ended while", "was under way", size=4, levels=(1,))
def coalesced_work_that_nobody_awaits(self):
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as coalesced:
        # So large that no rank has them before rank 2 has left.
        dist.all_reduce(torch.ones(1 << 20))
        dist.all_reduce(torch.ones(1 << 20))  # rank 2
    if self.rank != 2:
        coalesced.wait()


@told("rank 0 left without receiving; rank ", "is waiting in send #", size=4)
def one_message_too_many_to_any(self):
    message = torch.ones(4)
    if self.rank == 0:
        for _ in range(6):
            dist.recv(message)
    else:
        for _ in range(3 if self.rank == 2 else 2):
            dist.send(message, 0)


@told("rank 1 of 3 raised ValueError: planted")
def two_groups_lose_their_peer(self):
    left, right = pairs_of(self)
    if self.rank == 1:
        raise ValueError("planted")  # rank 1
    if self.rank == 0:
        dist.all_reduce(torch.ones(4), group=left)  # rank 0
    else:
        dist.barrier(group=right)  # rank 2


# -- sound


@quiet()
def neighbours(self):
    left, right = pairs_of(self)
    if self.rank < 2:
        dist.all_reduce(torch.ones(4), group=left)
    if self.rank:
        dist.all_reduce(torch.ones(4), group=right)


@quiet(size=4)
def pairs_of_their_own(self):
    """Only members make such a group, which has a name of its own."""
    group = dist.new_group([0, 1] if self.rank < 2 else [2, 3], use_local_synchronization=True)
    dist.all_reduce(torch.ones(4), group=group)


@quiet()
def a_group_of_each_rank(self):
    group = dist.new_group([self.rank])
    dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


@quiet(size=4)
def a_mesh_with_its_dimensions(self):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))
    dist.all_reduce(torch.ones(1), group=mesh["dp"].get_group())
    mesh._flatten("all")
    dist.all_reduce(torch.ones(1), group=mesh["all"].get_group())


@quiet(size=4)
def groups_anew(self):
    """After all groups are destroyed, names begin again."""
    for members in ([0, 1], [2, 3]):
        group = dist.new_group(members)
        if self.rank in members:
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{self.file_name}.again", 4)
    dist.init_process_group("gloo", store=store, rank=self.rank, world_size=4)
    group = dist.new_group([0, 3])
    if self.rank in (0, 3):
        dist.all_reduce(torch.ones(1), group=group)


@quiet(levels=(2,))
def an_error_of_a_wait_that_is_expected(self):
    """A rank ends, and the others expect an error of their wait.

    Without the sanitizer, nobody sees the wait, and gloo may wake it before its recorder says that the call is over.
    """
    if self.rank == 1:
        return
    work = dist.all_reduce(torch.ones(4), async_op=True)
    with self.assertRaises(RuntimeError):
        work.wait()


@quiet(size=4)
def messages_to_any(self):
    message = torch.ones(4)
    if self.rank == 0:
        for _ in range(6):
            dist.recv(message)
    else:
        for _ in range(2):
            dist.send(message, 0)


@quiet(size=2)
def a_rank_that_leaves_a_send(self):
    if self.rank == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(4), 0)
