"""Programs whose cause stands far from where they fail: in nested exceptions, keys, loops and helpers."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from kit.told import Programs

PROGRAMS = Programs(__name__)
told, quiet = PROGRAMS.told, PROGRAMS.quiet


@told("all 2 ranks raised CheckpointException", "Missing key in checkpoint state_dict: c. (rank 1)", size=2)
def another_key_of_one_rank(self):
    folder = f"{self.file_name}.checkpoint"
    dcp.save({"a": torch.ones(4)}, checkpoint_id=folder)
    more = {"c": torch.ones(4)} if self.rank else {}
    dcp.load({"a": torch.ones(4), **more}, checkpoint_id=folder)  # ranks 0, 1


@told("all 2 ranks raised CheckpointException", "Size mismatch between saved", "(ranks 0, 1)", size=2)
def another_size(self):
    folder = f"{self.file_name}.checkpoint"
    dcp.save({"a": torch.ones(4)}, checkpoint_id=folder)
    dcp.load({"a": torch.ones(5)}, checkpoint_id=folder)  # ranks 0, 1


# 2.11 does not say which file is missing.
WITHOUT_METADATA = "No such file or directory" if torch.__version__ >= (2, 12) else "is None"


@told("raised CheckpointException", "metadata", WITHOUT_METADATA, size=2)
def no_checkpoint(self):
    dcp.load({"a": torch.ones(4)}, checkpoint_id=f"{f'{self.file_name}.checkpoint'}/none")  # ranks 0, 1


# -- where a rank has left


@told("rank 2 left before all_reduce #3; ranks 0, 1 are waiting in it")
def a_break(self):
    for step in range(4):
        if self.rank == 2 and step == 2:
            break  # rank 2
        dist.all_reduce(torch.ones(2))  # ranks 0, 1


@told("rank 2 left before all_reduce #4; ranks 0, 1 are waiting in it")
def a_continue(self):
    for step in range(4):
        if self.rank == 2 and step == 2:
            continue  # rank 2
        dist.all_reduce(torch.ones(2))  # ranks 0, 1


def train(rank):
    for step in range(4):
        if rank == 2 and step == 2:
            return
        dist.all_reduce(torch.ones(2))


@told("rank 2 left before all_reduce #3; ranks 0, 1 are waiting in it")
def a_return_of_a_helper(self):
    """The row of rank 2 has the line of the `return`."""
    train(self.rank)


# -- compiled functions


@torch.compile(backend="eager")
def compiled_step(tensor):
    """A function with a collective in it."""
    return functional.all_reduce(tensor + 1, "sum", dist.group.WORLD) * 2


@told("rank 0 calls all_reduce [4] float32", "rank 1 calls all_reduce [5] float32", "in call #1 of", size=2)
def a_compiled_function(self):
    tensor = torch.ones(4 + self.rank)
    compiled_step(tensor)  # rank 0


def patient_store():
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=2000))
    return store


@told("ranks 0, 1 wait for the key 'b' of a store (line ", "which nobody sets", size=2)
def one_of_two_keys(self):
    store = patient_store()
    store.set("a", "1")
    store.wait(["a", "b"])  # ranks 0, 1


@told("rank 0 waits for the keys 'ready1', 'ready2' of a store (line ", "ranks 1, 2 wait in barrier #1")
def keys_of_a_comprehension(self):
    store = patient_store()
    if self.rank == 0:
        store.wait([f"ready{n}" for n in range(1, 3)])  # rank 0
    dist.barrier()  # ranks 1, 2


@told("rank 0 waits for the keys 'x/1', 'x/2' of a store (line ", "rank 1 waits in barrier #1", size=2)
def keys_in_a_variable(self):
    store, keys = patient_store(), ["x/1", "x/2"]
    if self.rank == 0:
        store.wait(keys)  # rank 0
    dist.barrier()  # rank 1


@quiet(size=2)
def a_checkpoint_that_is_right(self):
    folder = f"{self.file_name}.checkpoint"
    dcp.save({"a": torch.ones(4)}, checkpoint_id=folder)
    state = {"a": torch.zeros(4)}
    dcp.load(state, checkpoint_id=folder)
    self.assertEqual(state["a"], torch.ones(4))


@quiet(size=2)
def keys_that_come(self):
    store = dist.distributed_c10d._get_default_store()
    store.set(f"from {self.rank}", "")
    store.wait([f"from {rank}" for rank in range(2)])
