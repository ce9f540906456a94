"""Programs whose cause stands elsewhere: in the lists of groups, below other exceptions, in helpers that return."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from kit.told import Programs

PROGRAMS = Programs(__name__)
told, quiet = PROGRAMS.told, PROGRAMS.quiet


# -- groups with other members


@told("rank 2 creates a group of ranks 0-2", "create one of ranks 0-3", "in new_group #1", size=4)
def one_leaves_out_the_last(self):
    group = dist.new_group(range(self.world_size - (self.rank == 2)))  # rank 2
    dist.all_reduce(torch.ones(2), group=group)


@told("rank 1 creates a group of ranks 0, 1", "create one of ranks 0, 2", "in new_group #2")
def the_second_of_a_loop(self):
    for other in (1, 1 if self.rank == 1 else 2):
        dist.new_group([0, other])  # rank 1
    dist.barrier()


@told("rank 1 creates a group of ranks 0, 2", "create one of ranks 0, 1", "in new_group #1", size=4)
def subgroups_across(self):
    """Rank 1 takes each second rank, the others neighbours."""
    pairs = [[0, 2], [1, 3]] if self.rank == 1 else [[0, 1], [2, 3]]
    dist.new_subgroups_by_enumeration(pairs)  # rank 1
    dist.barrier()


# -- below other exceptions


@told("all 2 ranks raised RuntimeError: cannot resume", size=2)
def raised_again_as_another(self):
    try:
        dcp.load({"a": torch.ones(4)}, checkpoint_id=f"{self.file_name}.none")
    except dcp.CheckpointException as error:
        raise RuntimeError("cannot resume") from error  # ranks 0, 1


@told("rank 1 of 2 raised KeyError: 'c'", size=2)
def in_a_pool(self):
    def look_up(name):
        return {"a": 1, "b": 2}[name]  # rank 1

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(look_up, "abc" if self.rank else "ab"))
    dist.barrier()


@told("rank 1 of 2 raised ValueError: bad shard", size=2)
def behind_a_context(self):
    with contextlib.ExitStack() as stack:
        stack.callback(dist.get_rank)
        if self.rank:
            raise ValueError("bad shard")  # rank 1
    dist.barrier()


# -- ranks that have left


@told("rank 2 left before all_reduce #3; ranks 0, 1 are waiting in it")
def out_of_a_while(self):
    step = 0
    while True:
        if step == 2 + (self.rank != 2):
            break  # rank 2
        dist.all_reduce(torch.ones(2))  # ranks 0, 1
        step += 1


@told("rank 2 left before all_reduce #2; ranks 0, 1 are waiting in it")
def out_of_a_helper_of_a_helper(self):
    def batch(number):
        if self.rank == 2 and number == 1:
            return  # rank 2
        dist.all_reduce(torch.ones(2))  # ranks 0, 1

    def epoch():
        for number in range(2):
            batch(number)

    epoch()


@told("rank 2 left before all_reduce #2; ranks 0, 1 are waiting in it")
def out_of_an_except(self):
    for number in range(2):
        try:
            [10, 20, 30][number + (3 if self.rank == 2 and number else 0)]
        except IndexError:
            return  # rank 2
        dist.all_reduce(torch.ones(2))  # ranks 0, 1


@told("rank 2 left before all_reduce #2; ranks 0, 1 are waiting in it")
def out_of_a_with(self):
    for number in range(2):
        with contextlib.nullcontext():
            if self.rank == 2 and number:
                return  # rank 2
            dist.all_reduce(torch.ones(2))  # ranks 0, 1


# -- compiled functions


class Compiled(torch.nn.Module):
    """A module with a collective in its forward."""

    def forward(self, tensor):
        return functional.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1


@told("rank 0 calls all_reduce [4] float32", "rank 1 calls all_reduce [4] float64", "in call #1 of", size=2)
def a_compiled_module(self):
    module = torch.compile(Compiled(), backend="eager")
    module(torch.ones(4, dtype=torch.float64 if self.rank else torch.float32))  # rank 1


# -- keys of stores


@told("rank 0 waits for the key 'epoch/3' of a store", "ranks 1, 2 wait in barrier #1")
def a_key_of_a_helper(self):
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=2000))

    def await_epoch(number):
        return store.get(f"epoch/{number}")  # rank 0

    if self.rank == 0:
        await_epoch(3)
    dist.barrier()  # ranks 1, 2


# -- sound


@quiet(size=4)
def pairs_that_all_make(self):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(torch.ones(2), group=pairs[self.rank // 2])


@quiet(size=4)
def pairs_that_their_members_make(self):
    pair = dist.new_group([0, 1] if self.rank < 2 else [2, 3], use_local_synchronization=True)
    dist.all_reduce(torch.ones(2), group=pair)


@quiet(size=4)
def members_in_another_order(self):
    group = dist.new_group([3, 0, 2, 1] if self.rank == 2 else [0, 1, 2, 3])
    dist.all_reduce(torch.ones(2), group=group)


@quiet(size=4)
def subgroups_that_all_make(self):
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    dist.all_reduce(torch.ones(2), group=group)


@quiet()
def groups_in_a_loop(self):
    groups = [dist.new_group([0, other]) for other in (1, 2)]
    for other, group in zip((1, 2), groups, strict=True):
        if self.rank in (0, other):
            dist.all_reduce(torch.ones(2), group=group)


@quiet(size=2)
def a_new_start_without_a_checkpoint(self):
    state = {"a": torch.ones(4)}
    with contextlib.suppress(dcp.CheckpointException):
        dcp.load(state, checkpoint_id=f"{self.file_name}.none")
    dist.all_reduce(state["a"])


@quiet(size=2)
def an_error_of_a_pool_that_is_caught(self):
    with ThreadPoolExecutor(2) as pool, contextlib.suppress(KeyError):
        list(pool.map({"a": 1}.__getitem__, "ab"))
    dist.barrier()


@quiet()
def all_break_at_once(self):
    for step in range(4):
        if step == 2:
            break
        dist.all_reduce(torch.ones(2))


@quiet()
def no_member_of_the_group(self):
    group = dist.new_group([0, 1])

    def train():
        if self.rank == 2:
            return
        for _ in range(3):
            dist.all_reduce(torch.ones(2), group=group)

    train()


@quiet()
def all_return_out_of_a_with(self):
    for number in range(2):
        with contextlib.nullcontext():
            if number:
                return
            dist.all_reduce(torch.ones(2))


@quiet(size=2)
def compiled_modules_that_agree(self):
    module = torch.compile(Compiled(), backend="eager")
    self.assertEqual(module(torch.ones(4)), torch.full((4,), 5.0))


@quiet(size=2)
def a_key_of_a_thread(self):
    store = dist.distributed_c10d._get_default_store()
    thread = threading.Thread(target=store.set, args=(f"epoch/{self.rank}", "1"))
    thread.start()
    for rank in range(2):
        store.get(f"epoch/{rank}")
    thread.join()


@quiet(size=2)
def raised_and_caught_as_another(self):
    with self.assertRaisesRegex(RuntimeError, "cannot resume"):
        try:
            dcp.load({"a": torch.ones(4)}, checkpoint_id=f"{self.file_name}.none")
        except dcp.CheckpointException as error:
            raise RuntimeError("cannot resume") from error
    dist.barrier()
