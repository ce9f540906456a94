"""Programs of libraries whose ranks hold other amounts: experts, ragged batches, objects, shards; one slip each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from kit.told import Programs
from told_uneven import splits_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

PROGRAMS = Programs(__name__)
told, quiet = PROGRAMS.told, PROGRAMS.quiet


class Exchange(torch.autograd.Function):
    """Tokens to their experts, and in the backward pass their gradients back."""

    @staticmethod
    def forward(context: Any, tokens: torch.Tensor, ins: list[int], outs: list[int]) -> torch.Tensor:
        context.splits = ins, outs
        out = tokens.new_empty(sum(outs), *tokens.shape[1:])
        dist.all_to_all_single(out, tokens.contiguous(), outs, ins)
        return out

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        ins, outs = context.splits
        back = gradient.new_empty(sum(ins), *gradient.shape[1:])
        dist.all_to_all_single(back, gradient.contiguous(), ins, outs)  # back
        return back, None, None


def lengths(test: Any) -> list[int]:
    """The rows that each rank has."""
    return [3 + 2 * rank for rank in range(test.world_size)]


# -- experts


@told("rank 2 calls all_reduce [1] float32", "the others call all_to_all", "in call #1 of the default group", size=4)
def functional_exchange(self):
    ins, outs = splits_of(self)
    if self.rank == 2:
        functional.all_reduce(torch.ones(1), "max", dist.group.WORLD).wait()  # rank 2
    functional.all_to_all_single(torch.ones(32), outs, ins, dist.group.WORLD).wait()  # ranks 0, 1, 3


@told("rank 3 calls barrier, the others call all_to_all", "in call #2 of the default group", size=4)
def a_backward_pass_that_a_rank_leaves_out(self):
    tokens = torch.ones(32, 4, requires_grad=True)
    loss = Exchange.apply(tokens, *splits_of(self)).sum()
    if self.rank != 3:
        loss.backward()
    dist.barrier()  # rank 3


@told("rank 1 calls all_to_all", "bfloat16", "the others call all_to_all", "in call #1 of the default group", size=4)
def probabilities_before_tokens(self):
    ins, outs = splits_of(self)
    tokens, probabilities = torch.ones(32, dtype=torch.bfloat16), torch.ones(32)
    for mine in (tokens, probabilities) if self.rank == 1 else (probabilities, tokens):
        dist.all_to_all_single(mine.new_empty(sum(outs)), mine, outs, ins)  # rank 1


@told("rank 2 calls all_reduce [6] float32", "the others call all_reduce [4] float32", "in call #1 of", size=4)
def gradients_of_an_expert_without_tokens(self):
    """It has none, so the rank reduces those of the next expert."""
    counts = [0 if (self.rank, expert) == (2, 0) else 5 for expert in range(2)]
    for expert, count in enumerate(counts):
        if count:
            dist.all_reduce(torch.ones(4 + 2 * expert))  # rank 2


@told("rank 1 left before all_to_all", "#3; ranks 0, 2, 3 are waiting in it", size=4)
def a_rank_without_tokens_leaves(self):
    ins, outs = splits_of(self)
    for layer in range(3):
        if layer == 2 and self.rank == 1:
            break  # rank 1
        dist.all_to_all_single(torch.empty(sum(outs)), torch.ones(32), outs, ins)  # ranks 0, 2, 3


@told("rank 2 calls all_to_all", "rank 3 calls all_reduce [2] float32", "in call #1 of group mesh_expert", size=4)
def a_metric_in_the_group_of_experts(self):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    group, place = mesh["expert"].get_group(), mesh.get_local_rank("expert")
    if self.rank == 3:
        dist.all_reduce(torch.ones(2), group=group)  # rank 3
    sent, received = [[1, 2], [3, 4]][place], [[1, 3], [2, 4]][place]
    dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent, group=group)


@told("rank 0 calls broadcast [8] float32", "the others call all_to_all", "in call #1 of the default group", size=4)
def work_that_is_awaited_later(self):
    ins, outs = splits_of(self)
    if self.rank == 0:
        dist.broadcast(torch.ones(8), 0)  # rank 0
    work = dist.all_to_all_single(torch.empty(sum(outs)), torch.ones(32), outs, ins, async_op=True)  # ranks 1-3
    work.wait()


@told("sends 4 elements to rank 3, which expects 2, in call #1 of group experts", size=4, levels=(2,))
def counts_of_the_step_before(self):
    group = dist.new_group([1, 3], group_desc="experts")
    if self.rank in (1, 3):
        sent = [1, 4] if self.rank == 1 else [2, 3]
        received = [1, 2] if self.rank == 1 else [2, 3]
        out, mine = torch.empty(sum(received)), torch.ones(sum(sent))
        dist.all_to_all_single(out, mine, received, sent, group=group)  # rank 1


# -- ragged batches


@told("rank 2 calls all_gather [9] float32", "the others call all_gather [7] float32", "in call #2 of the default")
def padding_to_another_length(self):
    """Each pads to what it believes to be the longest."""
    mine = torch.ones(7)
    every = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(every, torch.tensor([7]))
    longest = 9 if self.rank == 2 else int(max(every))
    padded = torch.nn.functional.pad(mine, (0, longest - 7))
    dist.all_gather([torch.empty(longest) for _ in range(3)], padded)  # rank 2


@told("rank 1 calls gather [5] float32", "the others call gather [3] float32", "in call #1 of the default group")
def a_gather_of_rows_without_padding(self):
    mine = torch.ones(5 if self.rank == 1 else 3)
    dist.gather(mine, [torch.empty(3) for _ in range(3)] if self.rank == 0 else None)  # rank 1


@told("rank 0 calls all_reduce [3] float32", "the others call all_gather", "[5] float32", "in call #1 of the default")
def lengths_and_rows_swapped(self):
    if self.rank == 0:
        dist.all_reduce(torch.ones(3))  # rank 0
    rows = torch.ones(5)
    dist.all_gather_into_tensor(torch.empty(15), rows)  # ranks 1, 2


@told("rank 2 calls broadcast [7] float32", "the others call broadcast [5] float32", "in call #1 of the default group")
def a_broadcast_of_the_rows_of_each(self):
    dist.broadcast(torch.ones(7 if self.rank == 2 else 5), 0)  # rank 2


@told("rank 1 calls", "the others call", "in call #1 of the default group")
def one_more_in_a_coalesced_gather(self):
    rows = [torch.ones(2, 3) for _ in range(3 if self.rank == 1 else 2)]
    outs = [torch.empty(6, 3) for _ in rows]
    with dist.distributed_c10d._coalescing_manager():
        for out, mine in zip(outs, rows, strict=True):
            dist.all_gather_into_tensor(out, mine)  # rank 1


@told("rank 2 calls broadcast [2] int64", "the others call broadcast [1] int64", "in call #1 of the default group")
def one_more_object(self):
    dist.broadcast_object_list([None] * (2 if self.rank == 2 else 1), 0)  # rank 2


@told("rank 0 calls all_gather [1] int64", "the others call all_gather_into_tensor [4] float32", levels=(2,))
def objects_against_tensors(self):
    if self.rank == 0:
        dist.all_gather_object([None] * 3, "x" * 50)  # rank 0
    dist.all_gather_into_tensor(torch.empty(12), torch.ones(4))  # ranks 1, 2


@told("rank 1 calls broadcast [1] int64", "the others call all_gather [1] int64", "in call #1 of the default group")
def objects_that_are_given_where_they_are_taken(self):
    if self.rank == 1:
        dist.scatter_object_list([None], None, src=0)  # rank 1
    else:
        dist.gather_object("x" * self.rank, [None] * 3 if self.rank == 0 else None, dst=0)  # ranks 0, 2


@told("rank 1 calls", "the others call barrier in call #1 of the default group")
def uneven_shards_of_one_rank(self):
    mesh = dist.init_device_mesh("cpu", (3,))
    tensor = distribute_tensor(torch.arange(28.0).view(7, 4), mesh, [Shard(0)], src_data_rank=None)
    if self.rank == 1:
        tensor.redistribute(placements=[Replicate()])  # rank 1
    dist.barrier()  # ranks 0, 2


@told("rank 2 calls", "the others call", "in call #1 of the default group")
def an_uneven_exchange_of_dtensors(self):
    mesh = dist.init_device_mesh("cpu", (3,))
    tensor = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)], src_data_rank=None)
    tensor.redistribute(placements=[Replicate() if self.rank == 2 else Shard(1)])  # rank 2


# -- sound


@quiet(size=4)
def a_backward_pass_of_all(self):
    tokens = torch.ones(32, 4, requires_grad=True)
    Exchange.apply(tokens, *splits_of(self)).sum().backward()
    self.assertEqual(tokens.grad, torch.ones(32, 4))


@quiet(size=4)
def functional_exchanges(self):
    ins, outs = splits_of(self)
    there = functional.all_to_all_single(torch.ones(32), outs, ins, dist.group.WORLD)
    functional.all_to_all_single(there * 2, ins, outs, dist.group.WORLD).sum().item()
    functional.all_reduce(torch.ones(1), "max", dist.group.WORLD).item()


@quiet(size=4)
def tokens_and_probabilities(self):
    ins, outs = splits_of(self)
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        mine = torch.ones(32, dtype=dtype)
        dist.all_to_all_single(mine.new_empty(sum(outs)), mine, outs, ins)


@quiet(size=4)
def experts_of_a_mesh(self):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    place, column = mesh.get_local_rank("expert"), mesh.get_local_rank("data")
    sent = [[1 + column, 2], [3, 4 + column]][place]
    received = [[1 + column, 3], [2, 4 + column]][place]
    group = mesh["expert"].get_group()
    dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent, group=group)
    dist.all_reduce(torch.ones(5 + place), group=mesh["data"].get_group())


@quiet(size=4)
def exchanges_under_way(self):
    ins, outs = splits_of(self)
    works = [dist.all_to_all_single(torch.empty(sum(outs)), torch.ones(32), outs, ins, async_op=True) for _ in range(3)]
    dist.all_reduce(torch.ones(1))
    for work in works:
        work.wait()


@quiet()
def rows_that_are_padded(self):
    mine = torch.ones(lengths(self)[self.rank])
    every = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(every, torch.tensor([len(mine)]))
    longest = int(max(every))
    dist.all_gather([torch.empty(longest) for _ in range(3)], torch.nn.functional.pad(mine, (0, longest - len(mine))))


@quiet()
def rows_in_messages(self):
    """Each message has the size of its sender's rows."""
    sizes = lengths(self)
    outs = [torch.empty(size) for size in sizes]
    operations = [
        dist.P2POp(kind, tensor, other)
        for other in range(3)
        if other != self.rank
        for kind, tensor in ((dist.isend, torch.ones(sizes[self.rank])), (dist.irecv, outs[other]))
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


@quiet()
def a_broadcast_of_each(self):
    for root, size in enumerate(lengths(self)):
        dist.broadcast(torch.ones(size), root)


@quiet()
def coalesced_gathers(self):
    rows = [torch.ones(2 + size, 3) for size in range(3)]
    outs = [torch.empty(3 * len(mine), 3) for mine in rows]
    with dist.distributed_c10d._coalescing_manager():
        for out, mine in zip(outs, rows, strict=True):
            dist.all_gather_into_tensor(out, mine)


@quiet()
def objects_there_and_back(self):
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [["x"] * 10**size for size in range(3)] if self.rank == 1 else None, src=1)
    dist.gather_object(mine, [None] * 3 if self.rank == 2 else None, dst=2)
    dist.broadcast_object_list(["x" * self.rank, self.rank], 0)


@quiet()
def uneven_shards(self):
    mesh = dist.init_device_mesh("cpu", (3,))
    whole = torch.arange(35.0).view(7, 5)
    tensor = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    self.assertEqual(tensor.redistribute(placements=[Shard(1)]).full_tensor(), whole)


@quiet()
def a_rank_with_nothing(self):
    mesh = dist.init_device_mesh("cpu", (3,))
    tensor = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)], src_data_rank=None)
    self.assertEqual(tensor.sum().full_tensor(), torch.tensor(8.0))
