"""Faults that only `--sanitize` finds, planted one by one: the program, the kinds of checks, and what is to be said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import planted
import torch
import torch.distributed as dist
from planted import DEFAULT, WORLD_SIZE, in_call, ones

MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM
BOTH, ALL = ("fresh", "persistent"), ("fresh", "persistent", "threaded")


@dataclass(frozen=True)
class SanitizedFault:
    """A planted fault: the kinds that find it, the outcome, texts of the message in order, and the bases."""

    body: Callable[[Any], None]
    kinds: tuple[str, ...]
    outcome: str
    texts: tuple[str, ...]
    bases: tuple[str, ...]


FAULTS: dict[str, SanitizedFault] = {}


def fault(
    outcome: str, *texts: str, kinds: tuple[str, ...] = (), bases: tuple[str, ...] = ("fresh",)
) -> Callable[[Any], Any]:
    def plant(body: Callable[[Any], None]) -> Callable[[Any], None]:
        FAULTS[body.__name__] = SanitizedFault(body, kinds, outcome, texts, bases)
        return body

    return plant


def op_of(rank: int) -> Any:
    return MAX if rank == 1 else SUM


# -- another root


@fault(
    "failed",
    in_call(1, DEFAULT, "broadcast [4] float32 root 1", "broadcast [4] float32 root 0"),
    "planted_sanitized.py:",
    bases=ALL,
)
def root_of_broadcast(self):
    dist.broadcast(ones(), 1 if self.rank == 1 else 0)


@fault("failed", in_call(1, DEFAULT, "reduce [4] float32 sum root 1", "reduce [4] float32 sum root 0"), bases=ALL)
def root_of_reduce(self):
    dist.reduce(ones(), 1 if self.rank == 1 else 0)


@fault("failed", in_call(1, DEFAULT, "gather [4] float32 root 1", "gather [4] float32 root 0"))
def root_of_gather(self):
    root = 1 if self.rank == 1 else 0
    dist.gather(ones(), [ones() for _ in range(WORLD_SIZE)] if self.rank == root else None, dst=root)


@fault("failed", "ranks disagree in call #1", "scatter", "root 1", "root 0")
def root_of_scatter(self):
    root = 1 if self.rank == 1 else 0
    dist.scatter(ones(), [ones() for _ in range(WORLD_SIZE)] if self.rank == root else None, src=root)


@fault("failed", "ranks disagree in call #1 of group dp (ranks 0, 1)", "root 0", "root 1")
def root_in_a_subgroup(self):
    group = dist.new_group([0, 1], group_desc="dp")
    if self.rank < 2:
        dist.broadcast(ones(), self.rank, group=group)


@fault("failed", "ranks disagree in call #1", "root 1", "root 0")
def root_of_an_object(self):
    dist.broadcast_object_list([self.rank], src=1 if self.rank == 1 else 0)


@fault("failed", "ranks disagree in call #", "gather", "root 1", "gather", "root 0")
def root_of_gathered_objects(self):
    root = 1 if self.rank == 1 else 0
    dist.gather_object(self.rank, [None] * WORLD_SIZE if self.rank == root else None, dst=root)


@fault("failed", in_call(1, DEFAULT, "broadcast [1] int64 root 1", "broadcast [1] int64 root 0"))
def root_of_scattered_objects(self):
    root = 1 if self.rank == 1 else 0
    dist.scatter_object_list([None], [1, 2, 3] if self.rank == root else None, src=root)


@fault("failed", in_call(1, DEFAULT, "all_reduce [4] float32 sum", "monitored_barrier"))
def monitored_barrier_against_all_reduce(self):
    dist.all_reduce(ones()) if self.rank == 1 else dist.monitored_barrier()


@fault("failed", in_call(1, DEFAULT, "all_gather_into_tensor [4, 2] float32", "all_gather_into_tensor [2, 4] float32"))
def shape_of_all_gather(self):
    mine = torch.ones((4, 2) if self.rank == 1 else (2, 4))
    dist.all_gather_into_tensor(torch.empty(WORLD_SIZE * mine.shape[0], mine.shape[1]), mine)


@fault("failed", "ranks disagree in call #1", "rank 1 calls all_gather", "[2, 6]", "call all_gather", "[6, 2]")
def dimension_of_a_sharded_dtensor(self):
    from torch.distributed.tensor import DTensor, Shard

    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
    sides, dimension = ((2, 6), 0) if self.rank == 1 else ((6, 2), 1)
    DTensor.from_local(torch.ones(sides), mesh, [Shard(dimension)], shape=(6, 6), stride=(6, 1)).full_tensor()


@fault(
    "error", "rank 0 waits in the default group (send #1 to rank 1, line", "for rank 1, which waits", "all_reduce #1"
)
def message_against_a_collective(self):
    if self.rank == 0:
        dist.send(ones(), 1)
    dist.all_reduce(ones())
    if self.rank == 1:
        dist.recv(ones(), 0)


# -- another reduce operation: all ranks pass without a check


@fault(
    "failed",
    in_call(1, DEFAULT, "all_reduce [4] float32 max", "all_reduce [4] float32 sum"),
    bases=ALL,
)
def op_of_all_reduce(self):
    dist.all_reduce(ones(), op_of(self.rank))


@fault("failed", in_call(1, DEFAULT, "reduce [4] float32 max root 0", "reduce [4] float32 sum root 0"), bases=ALL)
def op_of_reduce(self):
    dist.reduce(ones(), 0, op_of(self.rank))


@fault("failed", "rank 1 calls reduce_scatter_tensor [3] float32 max, ranks 0, 2 call")
def op_of_reduce_scatter(self):
    dist.reduce_scatter_tensor(ones(1), ones(WORLD_SIZE), op_of(self.rank))


@fault("failed", in_call(3, DEFAULT, "all_reduce [4] float32 max", "all_reduce [4] float32 sum"), bases=ALL)
def op_of_a_later_all_reduce(self):
    dist.all_reduce(ones())
    dist.barrier()
    dist.all_reduce(ones(), op_of(self.rank))


@fault("failed", "rank 1 calls all_reduce_coalesced [4] float32 [3] float32 max")
def op_of_a_coalesced_all_reduce(self):
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(ones(4), op_of(self.rank))
        dist.all_reduce(ones(3), op_of(self.rank))


@fault("failed", in_call(1, DEFAULT, "all_reduce [4] float32 max", "all_reduce [4] float32 sum"))
def op_in_another_thread(self):
    thread = threading.Thread(target=lambda: dist.all_reduce(ones(), op_of(self.rank)))
    thread.start()
    thread.join()


@fault("failed", in_call(1, DEFAULT, "all_reduce [4] float32 max", "all_reduce [4] float32 sum"), bases=BOTH)
def op_of_a_functional_collective(self):
    import torch.distributed._functional_collectives as functional

    functional.all_reduce(ones(), "max" if self.rank == 1 else "sum", dist.group.WORLD).sum().item()


# Where ranks import or compile first, one may not have come yet when the others are told.
@fault("failed", "ranks disagree in call #1", "all_gather_into_tensor", "[4] int32")
def dtype_of_a_compiled_functional_collective(self):
    import torch.distributed._functional_collectives as functional

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(tensor):
        return functional.all_gather_tensor(tensor, 0, dist.group.WORLD) + 1

    step(ones(4, torch.int32 if self.rank == 1 else torch.float32))


@fault("failed", "ranks disagree in call #1", "max", "sum")
def op_of_a_compiled_collective(self):
    @torch.compile(backend="aot_eager", fullgraph=False)
    def step(tensor):
        dist.all_reduce(tensor, op_of(self.rank))
        return tensor + 1

    step(ones())


@fault("failed", "ranks disagree in call #", "max", "sum")
def op_of_a_partial_dtensor(self):
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
    partial = DTensor.from_local(ones(), mesh, [Partial("max" if self.rank == 1 else "sum")], run_check=False)
    partial.redistribute(placements=[Replicate()]).to_local()


@fault("failed", "ranks disagree in call #1", "reduce_scatter_tensor")
def placements_of_a_redistribution(self):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
    partial = DTensor.from_local(torch.ones(6, 4), mesh, [Partial()], run_check=False)
    partial.redistribute(placements=[Replicate() if self.rank == 1 else Shard(0)]).to_local()


@fault("failed", "ranks disagree in call #1", "all_gather_into_tensor [3] float32")
def order_of_fsdp(self):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
    layers = [torch.nn.Linear(3, 3, bias=bias) for bias in (True, False)]
    found = torch.ones(2, 3)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    for layer in reversed(layers) if self.rank == 1 else layers:
        found = layer(found)


@fault("failed", "ranks disagree in call #", "sum", "max")
def op_of_a_hook_of_ddp(self):
    model = torch.nn.Linear(4, 4)
    replica = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)

    def reduce(state, bucket):
        dist.all_reduce(bucket.buffer(), op_of(self.rank))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replica.register_comm_hook(None, reduce)
    replica(torch.ones(2, 4)).sum().backward()


# -- sizes: a rank that gets more than it expects may crash, but its log stays


@fault("failed", in_call(1, DEFAULT, "reduce_scatter_tensor [6] float32 sum", "reduce_scatter_tensor [3] float32 sum"))
def count_of_reduce_scatter(self):
    count = 2 if self.rank == 1 else 1
    dist.reduce_scatter_tensor(torch.empty(count), ones(WORLD_SIZE * count))


@fault("failed", "rank 1 calls all_reduce_coalesced [4] float32 [4] float32 sum, ranks 0, 2 call")
def one_more_in_a_coalesced_all_reduce(self):
    with dist.distributed_c10d._coalescing_manager():
        for _ in range(2 if self.rank == 1 else 1):
            dist.all_reduce(ones())


@fault("failed", f"in call #1 of {DEFAULT}: rank 0 sends 2 elements to rank 1, which expects 1")
def splits_of_all_to_all_single(self):
    incoming = [1, 1, 1]
    outgoing = [1, 2, 0] if self.rank == 0 else [1, 1, 1]
    dist.all_to_all_single(torch.empty(3), ones(3), incoming, outgoing)


# -- messages


@fault(
    "failed",
    "message #1 of the default group: rank 0 sends [4] float32 to rank 1, which receives [8] float32",
)
def messages_in_another_order(self):
    """gloo may abort the receiver, which leaves only its log."""
    for count in (4, 8) if self.rank == 0 else (8, 4):
        if self.rank == 0:
            dist.send(ones(count), 1)
        elif self.rank == 1:
            dist.recv(ones(count), 0)


@fault("failed", "nobody received rank 0's send #1 to rank 1 [4]", kinds=("calls",), bases=BOTH)
def send_that_nobody_receives(self):
    if self.rank == 0:
        dist.isend(ones(), 1)
    dist.barrier()  # else rank 1 may have ended before, which fails the send


@fault("failed", "rank 0 sends [4] int32 to rank 1, which receives [4] float32")
def type_of_a_message(self):
    planted.type_of_a_message(self)


@fault(
    "error",
    "rank 0 waits in the default group (recv #1 from rank 1, line ",
    "which waits in the default group (recv #1 from rank 2, line ",
    "for rank 0",
)
def receives_in_a_ring(self):
    planted.receives_in_a_ring(self)


@fault(
    "error",
    "rank 0 waits in the default group (send #1 to rank 1, tag 1,",
    "(recv #1 from rank 0, tag 2,",
    "for rank 0",
)
def tag_of_a_message(self):
    planted.tag_of_a_message(self)


@fault("error", "left without sending; rank 0 is waiting in recv #1 from any rank")
def receive_from_any_rank(self):
    planted.receive_from_any_rank(self)


# -- outputs and numbers


@fault("failed", "AssertionError", kinds=("poison",), bases=BOTH)
def output_that_is_read_before_the_wait(self):
    out = torch.zeros(4)
    if self.rank == 0:
        dist.barrier()
        dist.send(ones(), 1)
    elif self.rank == 1:
        work = dist.irecv(out, 0)
        seen = out.clone()  # from before the message: zeros, but for the poison
        dist.barrier()
        work.wait()
        self.assertEqual(seen, torch.zeros(4))
    else:
        dist.barrier()


@fault(
    "failed",
    "rank 1: 1 NaN of 4 elements enter all_reduce [4] float32 (planted_sanitized.py:",
    kinds=("nan",),
    bases=ALL,
)
def nan_in_all_reduce(self):
    mine = ones()
    if self.rank == 1:
        mine[2] = float("nan")
    dist.all_reduce(mine)


@fault("failed", "rank 0: 2 infinite of 4 elements enter send [4] float32", kinds=("nan",))
def infinity_in_a_message(self):
    if self.rank == 0:
        dist.send(torch.tensor([1.0, float("inf"), 2.0, -float("inf")]), 1)
    elif self.rank == 1:
        dist.recv(ones(), 0)


@fault("failed", "rank 2: ", "NaN of", "enter all_reduce", kinds=("nan",))
def nan_in_a_gradient_of_ddp(self):
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    scale = float("nan") if self.rank == 2 else 1.0
    (replica(torch.ones(2, 4)).sum() * scale).backward()


@fault(
    "failed",
    "calls all_gather_into_tensor_coalesced [4, 4] float32 (Shard(dim=1),) to (Replicate(),), the others call",
    "[4, 4] float32 (Shard(dim=0),) to (Replicate(),) in call #1 of the default group",
)
def placement_of_equal_parts(self):
    """All ranks would pass, with other tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (self.world_size,))
    DTensor.from_local(ones(16).view(4, 4), mesh, [Shard(1 if self.rank == 1 else 0)]).full_tensor()


@fault("failed", "[3, 3] float32 gather_dim 1, the others call", "[3, 3] float32 gather_dim 0 in call #1")
def dimension_of_equal_parts(self):
    from torch.distributed._functional_collectives import all_gather_tensor

    all_gather_tensor(ones(9).view(3, 3), 1 if self.rank == 1 else 0, dist.group.WORLD) + 0


# -- orders


@fault(
    "failed",
    "issue collectives in opposite orders: rank 0 issues all_reduce #1 of group dp before all_reduce #1 of group tp",
    "rank 1 issues all_reduce #1 of group tp before all_reduce #1 of group dp",
    kinds=("order-fails",),
)
def opposite_orders_that_pass(self):
    groups = [dist.new_group([0, 1], group_desc=name) for name in ("dp", "tp")]
    if self.rank < 2:
        works = [
            dist.all_reduce(ones(), group=group, async_op=True) for group in groups[:: 1 if self.rank == 0 else -1]
        ]
        for work in works:
            work.wait()


@fault(
    "failed",
    "ranks 0, 1 issue messages and collectives in opposite orders: ",
    "rank 0 issues send #1 to rank 1 of the default group before all_reduce #1 of the default group",
    kinds=("order-fails",),
)
def message_before_a_collective_in_one_rank(self):
    """With a communicator that executes its calls in order, the ranks would wait for each other."""
    message = dist.isend(ones(), 1) if self.rank == 0 else None
    reduced = dist.all_reduce(ones(), async_op=True)
    if self.rank == 1:
        dist.recv(ones(), 0)
    reduced.wait()
    if message is not None:
        message.wait()


@fault(
    "failed",
    "issue messages and collectives in opposite orders: ",
    "recv #1 from rank 0",
    kinds=("order-fails",),
)
def message_and_two_groups(self):
    """Rank 2 orders the groups of the two others."""
    first, second = dist.new_group([0, 2], group_desc="dp"), dist.new_group([1, 2], group_desc="tp")
    works = []
    if self.rank == 0:
        works.append(dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(), 1)])[0])
    for group in (second,) if self.rank == 1 else (first,) if self.rank == 0 else (first, second):
        works.append(dist.broadcast(ones(), 2, group=group, async_op=True))
    if self.rank == 1:
        works.append(dist.irecv(ones(), 0))
    for work in works:
        work.wait()


@fault("failed", "ranks disagree in call #1", "all_reduce", kinds=("hash",))
def order_of_a_set(self):
    names = {f"layer{number}" for number in range(40)}
    for name in names:
        dist.all_reduce(ones(1 + int(name.removeprefix("layer"))))


@fault(
    "failed",
    in_call(2, DEFAULT, "all_reduce [1] float32 max", "all_reduce [1] float32 sum"),
    "in op_in_a_callback_of_torch",
)
def op_in_a_callback_of_torch(self):
    """It runs in a thread of gloo, and none of its frames is of the program: the line of the main thread counts."""
    names = {"dist": dist, "torch": torch, "op": op_of(self.rank)}
    future = dist.all_reduce(ones(), async_op=True).get_future()
    future.then(eval(compile("lambda _: dist.all_reduce(torch.ones(1), op)", "<in torch>", "eval"), names)).wait()
