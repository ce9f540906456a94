"""Calls with long texts in a file with a long name: the rank, the operation and the line are on the screen."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from kit.told import Programs
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

PROGRAMS = Programs(__name__)
told = PROGRAMS.told


@told("rank 1 calls", "the others call barrier in call #2 of the default group")
def a_redistribution(self):
    mesh = dist.init_device_mesh("cpu", (3,))
    tensor = distribute_tensor(torch.ones(12), mesh, [Shard(0)], src_data_rank=None)
    dist.all_reduce(torch.ones(3))
    tensor.redistribute(placements=[Replicate() if self.rank == 1 else Shard(0)])  # rank 1
    dist.barrier()  # ranks 0, 2


@told(
    "rank 1 calls",
    "the others call",
    "in call #1 of the default group",
    shown=("(Shard(dim=1),)", "(Shard(dim=0),)"),
    levels=(2,),
)
def placements_of_the_same_size(self):
    """What tells the ranks apart comes late in a long text."""
    mesh = dist.init_device_mesh("cpu", (3,))
    DTensor.from_local(
        torch.ones(6, 6), mesh, [Shard(1 if self.rank == 1 else 0)], run_check=False
    ).full_tensor()  # rank 1


@told("rank 2 calls", "the others call", "in call #1 of group", shown=("gather_dim 1", "gather_dim 0"), levels=(2,))
def dimensions_of_a_gather_in_a_named_group(self):
    group = dist.new_group(group_desc="the_groups_of_pipeline_and_tensor_parallel_ranks")
    mine = torch.ones(3, 3, 1, 1, 1, 1, 1, 1)
    functional.all_gather_tensor(mine, 1 if self.rank == 2 else 0, group) + 0  # rank 2


@told("rank 0 calls", "the others call", "in call #1 of the default group", shown=("[5001] float32", "[5000] float32"))
def the_last_of_coalesced_calls(self):
    last = torch.ones(5001 if self.rank == 0 else 5000)
    with dist.distributed_c10d._coalescing_manager():
        for size in (1000, 2000, 3000, 4000):
            dist.all_reduce(torch.ones(size))  # rank 0
        dist.all_reduce(last)


@told("rank 1 calls barrier, the others call all_reduce [4] float32", "in call #1 of the default group")
def a_lambda_in_a_comprehension(self):
    steps = [lambda: dist.barrier(), lambda: dist.all_reduce(torch.ones(4))]
    [step() for step in steps[: 1 if self.rank == 1 else 2][-1:]]


@told(
    "rank 1 calls all_reduce [5] float32", "the others call all_reduce [4] float32", "in call #1 of the default group"
)
def a_function_with_a_decorator_and_a_name_that_is_as_long_as_those_of_frameworks_are(self):
    def recorded(function):
        @functools.wraps(function)
        def run_with_all_that_the_profiler_of_the_trainer_wants_to_know(*arguments):
            return function(*arguments)

        return run_with_all_that_the_profiler_of_the_trainer_wants_to_know

    @recorded
    def reduce_the_norms_of_all_gradients_over_data_parallel_ranks(size):
        dist.all_reduce(torch.ones(size))  # rank 1

    reduce_the_norms_of_all_gradients_over_data_parallel_ranks(5 if self.rank == 1 else 4)


@told("rank 1 calls all_reduce [2] float32", "the others call barrier in call #1 of the default group")
def generated_code(self):
    """The file of the code is not there: the row has the line of its caller, which is."""
    names = {"dist": dist, "torch": torch, "rank": self.rank}
    text = "if rank == 1:\n    dist.all_reduce(torch.ones(2))\ndist.barrier()\n"
    exec(compile(text, "<the step that the trainer has generated>", "exec"), names)  # rank 1


@told("rank 2 calls", "the others call barrier in call #1 of the default group")
def an_object_that_is_collected(self):
    class Buffers:
        def __del__(self):
            dist.all_reduce(torch.ones(3, 1, 1, 1, 1))  # rank 2

    buffers = Buffers()
    if self.rank == 2:
        del buffers
    dist.barrier()  # ranks 0, 1


@told("rank 1 calls", "float8_e4m3fn", "the others call", "in call #1 of the default group")
def types_with_long_names(self):
    mine = torch.ones(3, 4, 5, 6).to(torch.float8_e4m3fn if self.rank == 1 else torch.uint8)
    dist.broadcast(mine, 0)  # rank 1


@told("rank 11 calls", "the others call", "in call #1 of group", size=12)
def many_ranks(self):
    group = dist.new_group(group_desc="the_groups_of_pipeline_and_tensor_parallel_ranks")
    dist.all_reduce(torch.ones(1, 2, 3, 4, 5, 6 if self.rank == 11 else 7), group=group)  # rank 11


@told("rank 2 calls", "the others call", "in call #1 of the default group")
def a_backward_pass(self):
    class ReduceFromTheModelParallelRegionOfTheTensor(torch.autograd.Function):
        @staticmethod
        def forward(context, tokens):
            return tokens * 2

        @staticmethod
        def backward(context, gradient):
            gradient = gradient.contiguous()
            dist.all_reduce(gradient)  # rank 2
            return gradient

    rows = 5 if self.rank == 2 else 4
    ReduceFromTheModelParallelRegionOfTheTensor.apply(torch.ones(rows, 3, requires_grad=True)).sum().backward()


@told("rank 2 calls barrier, the others call scatter into [4] float32", "in call #1 of the default group")
def a_scatter(self):
    if self.rank == 2:
        dist.barrier()  # rank 2
    dist.scatter(torch.empty(4), [torch.ones(4)] * 3 if self.rank == 0 else None)  # ranks 0, 1


@told("rank 2 calls all_reduce [1] float32", "the others call all_to_all", "in call #1 of the default group", size=6)
def an_exchange_with_splits(self):
    splits = [11, 12, 13, 14, 15, 16]
    if self.rank == 2:
        dist.all_reduce(torch.ones(1))  # rank 2
    theirs = [splits[self.rank]] * 6
    out, mine = torch.empty(sum(theirs), 100), torch.ones(sum(splits), 100)
    dist.all_to_all_single(out, mine, theirs, splits)  # ranks 0, 1, 3-5


@told("rank 0 calls", "int32", "the others call", "in call #1 of the default group")
def coalesced_calls(self):
    dtype = torch.int32 if self.rank == 0 else torch.float32
    with dist.distributed_c10d._coalescing_manager():
        for size in (1000, 2000, 3000, 4000):
            dist.all_reduce(torch.ones(size, dtype=dtype))  # rank 0


@told("rank 1 calls", "the others call", "in call #1 of group the_groups_of_pipeline_and_tensor_parallel_ranks")
def a_group_with_a_long_name(self):
    group = dist.new_group(group_desc="the_groups_of_pipeline_and_tensor_parallel_ranks")
    dist.all_reduce(torch.ones(5 if self.rank == 1 else 4, 1, 1, 1), group=group)  # rank 1


@told("rank 0 waits in", "(all_reduce #1", "for rank 1, which waits in", "(reduce #1", "for rank 0")
def a_deadlock_of_groups_with_long_names(self):
    first = dist.new_group([0, 1, 2], group_desc="the_groups_of_pipeline_and_tensor_parallel_ranks")
    second = dist.new_group([0, 1, 2], group_desc="the_groups_of_data_and_context_parallel_ranks")
    if self.rank == 1:
        dist.reduce(torch.ones(4), 2, group=second)  # rank 1
        dist.all_reduce(torch.ones(4), group=first)
    else:
        dist.all_reduce(torch.ones(4), group=first)  # ranks 0, 2
        dist.reduce(torch.ones(4), 2, group=second)


@told("ranks 0, 2, 4 call all_reduce [3, 1, 2, 3] float32", "the others call all_gather", "in call #1 of", size=6)
def ranks_in_halves(self):
    mine = torch.ones(3, 1, 2, 3)
    if self.rank % 2:
        dist.all_gather_into_tensor(torch.empty(18, 1, 2, 3), mine)  # ranks 1, 3, 5
    else:
        dist.all_reduce(mine)  # ranks 0, 2, 4


@told("rank 2 left before all_gather", "of group the_groups_of_pipeline", "ranks 0, 1 are waiting in it")
def a_rank_that_leaves(self):
    group = dist.new_group(group_desc="the_groups_of_pipeline_and_tensor_parallel_ranks")
    if self.rank == 2:
        return  # rank 2
    dist.all_gather_into_tensor(torch.empty(9), torch.ones(3), group=group)  # ranks 0, 1


@told("rank 0 sends [4, 4] float32 to rank 1, which receives [4, 4] int32, in message #1 of group the_groups_of")
def a_message(self):
    group = dist.new_group(group_desc="the_groups_of_pipeline_and_tensor_parallel_ranks")
    if self.rank == 0:
        dist.send(torch.ones(4, 4), 1, group=group)  # rank 0
    if self.rank == 1:
        dist.recv(torch.empty(4, 4, dtype=torch.int32), 0, group=group)  # rank 1


@told("rank 1 calls", "int64", "the others call", "in call #1 of the default group")
def many_inputs(self):
    dtype = torch.int64 if self.rank == 1 else torch.float32
    lists = [[torch.empty(2, 3, dtype=dtype) for _ in range(3)] for _ in range(5)]
    for outputs in lists:
        dist.all_gather(outputs, torch.ones(2, 3, dtype=dtype))  # rank 1


@told("rank 1 calls reduce [4, 3, 2, 1] float32 max root 1", "the others call reduce", levels=(2,))
def root_and_operation(self):
    root, op = (1, dist.ReduceOp.MAX) if self.rank == 1 else (0, dist.ReduceOp.SUM)
    dist.reduce(torch.ones(4, 3, 2, 1), root, op)  # rank 1


@told("rank 1 calls reduce_scatter_tensor [6, 5, 4, 3] float64 sum", "the others call", levels=(2,))
def a_long_operation(self):
    dtype = torch.float64 if self.rank == 1 else torch.float32
    dist.reduce_scatter_tensor(torch.empty(2, 5, 4, 3, dtype=dtype), torch.ones(6, 5, 4, 3, dtype=dtype))  # rank 1
