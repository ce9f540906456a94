"""Small programs for whole worlds, most with a slip of one rank, each class beside sound ones with the same lines.

A function is called with the rank and the size of the world. `# fault` marks the lines that a verdict has to name.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_gather_object, gather_object


def in_turn(rank, size, programs, *args):
    for program in programs:
        program(rank, size, *args)


# -- DDP, whose reducer is waited for at the end of the backward pass


def ddp(*layers):
    return nn.parallel.DistributedDataParallel(nn.Sequential(*(layers or (nn.Linear(4, 4),))))


def step(model):
    model(torch.ones(2, 4)).sum().backward()


def group(size):
    return dist.new_group(list(range(size)))


def metric(of):
    dist.all_reduce(torch.ones(1), group=of)


def in_order(rank, slip, *actions):
    """Do two things, on rank 0 in the other order if that is the slip."""
    for action in reversed(actions) if slip and rank == 0 else actions:
        action()


def ddp_metric_first(rank, size, slip):
    of, model = group(size), ddp()
    in_order(rank, slip, lambda: step(model), lambda: metric(of))


def ddp_metric_in_third_step(rank, size, slip):
    of, model = group(size), ddp()
    for number in range(4):
        in_order(rank, slip and number == 2, lambda: step(model), lambda: metric(of))


def ddp_metric_before_backward(rank, size, slip):
    of, model = group(size), ddp()
    loss = model(torch.ones(2, 4)).sum()
    in_order(rank, slip, loss.backward, lambda: metric(of))


def ddp_barrier_of_another_group(rank, size, slip):
    of, model = group(size), ddp()
    in_order(rank, slip, lambda: step(model), lambda: dist.barrier(of))


def ddp_two_models(rank, size, slip):
    first = ddp()
    second = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=group(size))
    in_order(rank, slip, lambda: step(first), lambda: step(second))


def ddp_message_first(rank, size, slip):
    model = ddp()

    def talk():
        if rank == 0:
            dist.send(torch.ones(1), 1)
        elif rank == 1:
            dist.recv(torch.ones(1), 0)

    in_order(rank, slip, lambda: step(model), talk)


def ddp_step_fewer(rank, size, slip):
    model = ddp()
    for _ in range(3 - (slip and rank == 1)):
        step(model)


def ddp_step_more(rank, size, slip):
    model = ddp()
    for _ in range(2 + (slip and rank == 1)):
        step(model)


def ddp_without_sync(rank, size, slip):
    model = ddp()
    if slip and rank == 1:
        with model.no_sync():
            step(model)
    else:
        step(model)
    step(model)


def ddp_not_made(rank, size, slip):
    if not (slip and rank == 1):
        step(ddp())


def ddp_extra_forward_with_buffers(rank, size, slip):
    model = ddp(nn.Linear(4, 4), nn.BatchNorm1d(4))
    step(model)
    if slip and rank == 0:
        model(torch.ones(2, 4))


def ddp_other_width(rank, size, slip):
    step(ddp(nn.Linear(4, 8 if slip and rank == 1 else 4)))


def ddp_barrier_in_its_group(rank, size, slip):
    model = ddp()
    in_order(rank, slip, lambda: step(model), dist.barrier)


def ddp_static_graph(rank, size, slip):
    of, model = group(size), nn.parallel.DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    for number in range(3):
        in_order(rank, slip and number == 1, lambda: step(model), lambda: metric(of))


def ddp_of_two_buckets(rank, size, slip):
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    of, model = group(size), nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.01)

    def train():
        model(torch.ones(2, 64)).sum().backward()

    train()
    in_order(rank, slip, train, lambda: metric(of))


def ddp_accumulation(rank, size, slip):
    """The slip takes one more small batch without communication, and so leaves out the last."""
    model = ddp()
    for number in range(4):
        if number % 2 == 0 or (slip and rank == 1 and number == 3):
            with model.no_sync():
                step(model)
        else:
            step(model)


def ddp_clip_on_one_rank(rank, size, slip):
    model = ddp()
    step(model)
    if slip and rank == 2:
        dist.all_reduce(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    step(model)


def ddp_hook(rank, size, slip):
    of, model = group(size), ddp()
    model.register_comm_hook(None, averages)
    in_order(rank, slip, lambda: step(model), lambda: metric(of))


def averages(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


DDP = [value for name, value in list(globals().items()) if name.startswith("ddp_")]

# -- branches on values of other ranks


def total(value, op=dist.ReduceOp.SUM):
    tensor = torch.ones(1) * value
    dist.all_reduce(tensor, op)
    return tensor


def branch_on_item(rank, size):
    if total(rank).item() > 0:  # fault
        dist.barrier()


def branch_on_bool(rank, size):
    if total(rank):  # fault
        dist.barrier()


def branch_on_float(rank, size):
    if float(total(rank)) > 0:  # fault
        dist.barrier()


def branch_on_int(rank, size):
    for _ in range(int(total(rank))):  # fault
        dist.all_reduce(torch.ones(2))


def branch_on_list(rank, size):
    if sum(total(rank).tolist()) > 0:  # fault
        dist.barrier()


def branch_on_numpy(rank, size):
    if total(rank).numpy().sum() > 0:  # fault
        dist.barrier()


def branch_on_flag_to_stop(rank, size):
    for number in range(4):
        if total(rank == 0 and number == 2, dist.ReduceOp.MAX).item():  # fault
            break
    dist.barrier()


def branch_on_lengths(rank, size):
    lengths = [torch.zeros(1, dtype=torch.long) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([rank + 1]))
    longest = max(int(length) for length in lengths)  # fault
    dist.all_reduce(torch.ones(longest))


def branch_on_broadcast(rank, size):
    go_on = torch.tensor([float(rank == 0)])
    dist.broadcast(go_on, 0)
    if go_on.item():  # fault
        dist.all_reduce(torch.ones(2))


def branch_on_norm(rank, size):
    norm = total(rank).sqrt()
    if norm.item() < 1:  # fault
        dist.all_reduce(torch.ones(2))


def branch_on_finite(rank, size):
    found_inf = total(float(rank == 1))
    if (found_inf == 0).all():  # fault
        dist.all_reduce(torch.ones(2))


def branch_on_root(rank, size):
    best = total(rank).argmax() if rank == 0 else total(rank).long()
    root = int(best) % size  # fault
    dist.broadcast(torch.ones(2), root)


def branch_on_size(rank, size):
    sizes = torch.ones(size, dtype=torch.long) * (rank + 1)
    dist.all_to_all_single(torch.empty(size, dtype=torch.long), sizes)
    counts = total(rank).long().tolist()  # fault
    dist.all_reduce(torch.ones(1 + counts[0]))


def branch_in_while(rank, size):
    left = total(rank)
    while left.item() > 0:  # fault
        dist.barrier()
        left = left - 1


def branch_in_match(rank, size):
    match int(total(rank)):  # fault
        case 0:
            pass
        case _:
            dist.barrier()


def branch_in_comprehension(rank, size):
    steps = [step for step in range(3) if total(rank) * step > 2]  # fault
    dist.all_reduce(torch.ones(1 + len(steps)))


def branch_on_any(rank, size):
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, torch.ones(1) * (rank == 0))
    if any(part > 0 for part in parts):  # fault
        dist.barrier()


def branch_in_expression(rank, size):
    dist.barrier() if total(rank) > 0 else None  # fault


def branch_by_dict(rank, size):
    actions = {0: lambda: None}
    actions.get(int(total(rank)), dist.barrier)()  # fault


def branch_on_equal(rank, size):
    seen = total(rank)
    if not torch.equal(seen, torch.zeros(1)):  # fault
        dist.barrier()


def branch_on_allclose(rank, size):
    seen = total(rank)
    if not torch.allclose(seen, torch.zeros(1)):  # fault
        dist.barrier()


def branch_on_in(rank, size):
    seen = total(rank)
    if 0 not in seen:  # fault
        dist.barrier()


def branch_on_order(rank, size):
    seen = [total(rank), torch.ones(1)]
    if sorted(seen)[0] is seen[0]:  # fault
        dist.barrier()


def branch_on_mask(rank, size):
    seen = total(rank)
    dist.all_reduce(seen[seen > 0])  # fault


def branch_on_nonzero(rank, size):
    found = total(rank).nonzero()  # fault
    for _ in range(len(found)):
        dist.barrier()


def branch_on_unique(rank, size):
    both = torch.cat([total(rank), torch.zeros(1)])
    kinds = both.unique()  # fault
    dist.all_reduce(torch.ones(len(kinds)))


def branch_on_repeat(rank, size):
    count = total(rank).long()
    rows = torch.ones(1).repeat_interleave(1 + count)  # fault
    dist.all_reduce(rows)


def branch_in_assert(rank, size):
    seen = total(rank)
    try:
        assert seen > 0  # fault
    except AssertionError:
        return
    dist.barrier()


BRANCHES = [value for name, value in list(globals().items()) if name.startswith("branch_")]


def read_to_print(rank, size):
    print(total(rank).item())
    dist.barrier()


def read_after_all(rank, size):
    dist.barrier()
    if total(rank).item() > 0:
        print("positive")


def read_alike(rank, size):
    if total(1).item() > 0:
        dist.barrier()


def read_of_own(rank, size):
    own = torch.ones(1)
    total(rank)
    if own.item() > 0:
        dist.barrier()


def read_same_broadcast(rank, size):
    go_on = torch.ones(1)
    dist.broadcast(go_on, 0)
    if go_on.item():
        dist.barrier()


def read_in_each_step(rank, size):
    for _ in range(3):
        total(rank).item()


def read_of_shape(rank, size):
    if total(rank).shape[0] == 1:
        dist.barrier()


def read_for_a_list(rank, size):
    losses = [float(total(rank)) for _ in range(3)]
    dist.all_reduce(torch.ones(len(losses)))


def read_other_branch_of_no_calls(rank, size):
    value = 2 if total(rank).item() > 0 else 3
    print(value)
    dist.barrier()


def read_on_one_rank(rank, size):
    loss = total(rank)
    if rank == 0:
        print(loss.item())
    dist.barrier()


def read_of_a_gather(rank, size):
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, torch.ones(1))
    print(max(float(part) for part in parts))


def read_of_a_message(rank, size):
    if rank == 0:
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        part = torch.ones(1)
        dist.recv(part, 0)
        print(part.item())


def read_in_while(rank, size):
    left = total(1)
    while left.item() > 0:
        left = left - 1
    dist.barrier()


def read_in_match(rank, size):
    match int(total(rank)):
        case 0:
            name = "none"
        case _:
            name = "some"
    print(name)
    dist.barrier()


def read_in_comprehension(rank, size):
    steps = [step for step in range(3) if total(rank) * step > 2]
    print(steps)


def read_by_any(rank, size):
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, torch.ones(1))
    if any(part > 0 for part in parts):
        print("one")
    dist.barrier()


def read_by_mask(rank, size):
    seen = total(rank)
    print(seen[seen > 0].sum())
    dist.all_reduce(seen)


READS = [value for name, value in list(globals().items()) if name.startswith("read_")]


def unread_by_where(rank, size):
    seen = total(rank)
    dist.all_reduce(torch.where(seen > 0, seen, 0.0))


def unread_by_filled_mask(rank, size):
    seen, filled = total(rank), torch.ones(1)
    filled[seen > 0] = 2.0
    dist.all_reduce(filled)


def unread_by_index(rank, size):
    dist.all_reduce(torch.ones(8)[total(rank).long()])


def unread_by_known_mask(rank, size):
    dist.all_reduce(total(rank)[torch.tensor([True])])


def unread_by_loss(rank, size):
    """The size of one of its results depends on the lengths of the targets."""
    scores = (torch.zeros(5, 2, 4) + total(rank)).log_softmax(-1)
    dist.all_reduce(nn.functional.ctc_loss(scores, torch.ones(2, 2, dtype=torch.long), (5, 5), (2, 2)))


UNREAD = [value for name, value in list(globals().items()) if name.startswith("unread_")]

# -- objects of other ranks

OBJECT_CALLS = {
    "all_gather_object": lambda rank, size: dist.all_gather_object([None] * size, rank),
    "all_gather_object, by its name": lambda rank, size: all_gather_object([None] * size, rank),
    "all_gather_object, in a group": lambda rank, size: dist.all_gather_object([None] * size, rank, group(size)),
    "all_gather_object, of a tensor": lambda rank, size: dist.all_gather_object([None] * size, torch.ones(2)),
    "gather_object": lambda rank, size: dist.gather_object(rank, [None] * size if rank == 0 else None),
    "gather_object, by its name": lambda rank, size: gather_object(rank, [None] * size if rank == 0 else None),
    "gather_object, to the last": lambda rank, size: dist.gather_object(
        rank, [None] * size if rank == size - 1 else None, dst=size - 1
    ),
    "broadcast_object_list": lambda rank, size: dist.broadcast_object_list([rank], 0),
    "broadcast_object_list, in a group": lambda rank, size: dist.broadcast_object_list([rank], 1, group(size)),
    "scatter_object_list": lambda rank, size: dist.scatter_object_list([None], [1] * size if rank == 0 else None, 0),
    "recv_object_list": lambda rank, size: (
        dist.send_object_list([1], 1) if rank == 0 else dist.recv_object_list([0], 0)
    ),
}


def saves(rank, size, folder):
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.ones(4)}, checkpoint_id=os.path.join(folder, "a-checkpoint"))  # fault


def loads(rank, size, folder):
    import torch.distributed.checkpoint as dcp

    dcp.load({"weight": torch.ones(4)}, checkpoint_id=os.path.join(folder, "no-checkpoint"))  # fault


def saves_alone(rank, size, folder):
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.ones(4)}, checkpoint_id=os.path.join(folder, f"rank{rank}"), no_dist=True)


# -- work

WORKS = {
    "all_reduce": lambda size: dist.all_reduce(torch.ones(4), async_op=True),
    "broadcast": lambda size: dist.broadcast(torch.ones(4), 0, async_op=True),
    "reduce": lambda size: dist.reduce(torch.ones(4), 0, async_op=True),
    "all_gather": lambda size: dist.all_gather([torch.ones(4) for _ in range(size)], torch.ones(4), async_op=True),
    "all_gather_into_tensor": lambda size: dist.all_gather_into_tensor(
        torch.ones(4 * size), torch.ones(4), async_op=True
    ),
    "reduce_scatter_tensor": lambda size: dist.reduce_scatter_tensor(
        torch.ones(4), torch.ones(4 * size), async_op=True
    ),
    "all_to_all_single": lambda size: dist.all_to_all_single(torch.ones(size), torch.ones(size), async_op=True),
    "barrier": lambda size: dist.barrier(async_op=True),
    "all_reduce of max": lambda size: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX, async_op=True),
    "all_reduce of integers": lambda size: dist.all_reduce(torch.ones(4, dtype=torch.int64), async_op=True),
    "all_reduce in a group": lambda size: dist.all_reduce(torch.ones(4), group=group(size), async_op=True),
    "all_reduce of a matrix": lambda size: dist.all_reduce(torch.ones(4, 4), async_op=True),
}


def leaves_work(rank, size, op):
    WORKS[op](size)


def waits_for_work(rank, size, op):
    WORKS[op](size).wait()


def waits_for_future(rank, size, op):
    WORKS[op](size).get_future().wait()


WRITES = {
    "mul_": lambda tensor: tensor.mul_(2),
    "add_": lambda tensor: tensor.add_(1),
    "zero_": lambda tensor: tensor.zero_(),
    "fill_": lambda tensor: tensor.fill_(3),
    "copy_": lambda tensor: tensor.copy_(torch.zeros(4)),
    "item of a slice": lambda tensor: tensor[:1].fill_(2),
    "an index": lambda tensor: tensor.__setitem__(0, 5),
    "a view": lambda tensor: tensor.view(2, 2).mul_(2),
    "resize_": lambda tensor: tensor.untyped_storage().resize_(0),
    "item": lambda tensor: tensor[0].item(),
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.numpy(),
}


def uses_before_wait(rank, size, use):
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    WRITES[use](tensor)
    work.wait()


def uses_after_wait(rank, size, use):
    tensor = torch.ones(4)
    dist.all_reduce(tensor, async_op=True).wait()
    WRITES[use](tensor)


# -- receives from anybody


def any_receives(rank, size, received, sent):
    """Rank 0 receives so many messages, and each other rank sends so many."""
    if rank == 0:
        for _ in range(received):
            dist.recv(torch.empty(2))  # fault
    else:
        for _ in range(sent):
            dist.send(torch.ones(2), 0)


def any_answers(rank, size):
    if rank == 0:
        for _ in range(size - 1):
            source = dist.recv(torch.empty(2))
            dist.send(torch.ones(2), source)
    else:
        dist.send(torch.ones(2), 0)
        dist.recv(torch.empty(2), 0)


def any_in_background(rank, size):
    if rank == 0:
        for work in [dist.irecv(torch.empty(2)) for _ in range(size - 1)]:
            work.wait()
    else:
        dist.send(torch.ones(2), 0)


# -- chains, with their length by hand


def chain_of(rank, size, groups):
    """Reduce in each of these groups, one after the other."""
    made = [dist.new_group(list(ranks)) for ranks in groups]
    for of, ranks in zip(made, groups, strict=True):
        if rank in ranks:
            dist.all_reduce(torch.ones(1), group=of)


CHAINS = [
    # The groups in their order; the longest chain.
    ([], 0),
    ([(0, 1)], 1),
    ([(0, 1), (2, 3)], 1),
    ([(0, 1), (1, 2)], 2),
    ([(1, 2), (0, 1)], 2),
    ([(0, 1), (2, 3), (1, 2)], 2),
    ([(0, 1), (1, 2), (2, 3)], 3),
    ([(2, 3), (1, 2), (0, 1)], 3),
    ([(0, 1, 2, 3), (0, 4), (0, 1, 2, 3)], 3),
    ([(0, 1, 2, 3), (3, 4), (0, 1, 2, 3)], 3),
    ([(0, 1), (0, 1), (0, 1)], 3),
    ([(3, 4), (0, 1, 2, 3), (0, 4), (0, 1, 2, 3, 4)], 4),
    ([(0, 1), (2, 3), (0, 2), (1, 3), (0, 3)], 3),
]


def chain_of_messages(rank, size):
    """Each rank gets a message from the one before, and sends one to the next."""
    if rank > 0:
        dist.recv(torch.empty(1), rank - 1)
    if rank < size - 1:
        dist.send(torch.ones(1), rank + 1)


def chain_of_pairs(rank, size):
    if rank % 2 == 0:
        dist.send(torch.ones(1), rank + 1)
    else:
        dist.recv(torch.empty(1), rank - 1)


def chain_without_waits(rank, size):
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(5)]
    for work in works:
        work.wait()


# -- what one rank of many does alone


def odd_rank(rank, size, kind):
    """Rank 5 does something else than all others."""
    dist.all_reduce(torch.ones(1))
    if rank == 5:
        ODD[kind]()


ODD = {
    "raises KeyError": lambda: {}["table of eight"],
    "raises ValueError": lambda: int("x"),
    "raises ZeroDivisionError": lambda: 1 / 0,
    "fails": lambda: unequal(1, 2),
    "calls barrier": lambda: dist.barrier(),
    "calls all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "sends": lambda: dist.send(torch.ones(1), 0),
    "receives": lambda: dist.recv(torch.ones(1), 0),
    "leaves work": lambda: dist.isend(torch.ones(1), 0),
    "exits": lambda: sys.exit(3),
    "exits at once": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def unequal(one, other):
    assert one == other, "not equal"


# -- the default group


def makes_twice(rank, size, *args, **kwargs):
    dist.init_process_group("gloo")
    dist.init_process_group(*args, **kwargs)  # fault


def makes_again(rank, size):
    dist.init_process_group("gloo")
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()
