"""Programs for whole worlds: sound ones, and ones with a fault at the lines that are marked."""

import ctypes
import faulthandler
import os
import resource
import signal
import socket
import subprocess
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def ones(*shape):
    return torch.ones(*(shape or (4,)))


def mesh_of(size):
    return init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def train(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- sound


def step_in_two_dimensions(rank, size):
    mesh = mesh_of(size)
    dist.all_reduce(ones(), group=mesh["tp"].get_group())
    work = dist.all_reduce(ones(8), group=mesh["dp"].get_group(), async_op=True)
    work.wait()


def ddp(rank, size):
    train(nn.parallel.DistributedDataParallel(mlp()), ones(2, 8))


def fsdp(rank, size):
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, ones(2, 8))


def hsdp(rank, size):
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=mesh_of(size))
    train(model, ones(2, 8))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, inputs):
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


def tensor_and_sequence(rank, size):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = Block()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh_of(size)["tp"], plan)
    train(model, ones(2, 4, 8))


def pipeline(rank, size, interleaved=False):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    stages = 4
    mesh = init_device_mesh("cpu", (size // stages, stages), mesh_dim_names=("dp", "pp"))["pp"]
    place = mesh.get_local_rank()
    part = ones(2, 8).requires_grad_()

    def stage(index, number):
        module = nn.Linear(8, 8)
        device = torch.device("cpu")
        shapes = {"input_args": (part,), "output_args": (part,)}
        return PipelineStage(module, index, number, device, group=mesh.get_group(), **shapes)

    def loss(output, target):
        return (output - target).sum()

    if interleaved:
        both = [stage(place, 2 * stages), stage(place + stages, 2 * stages)]
        schedule = ScheduleInterleaved1F1B(both, 4, loss_fn=loss)
    else:
        schedule = Schedule1F1B(stage(place, stages), 4, loss_fn=loss)
    inputs = (ones(8, 8),) if place == 0 else ()
    target = {"target": ones(8, 8)} if place == stages - 1 else {}
    schedule.step(*inputs, **target)


def interleaved(rank, size):
    pipeline(rank, size, interleaved=True)


def experts(rank, size):
    tokens = ones(2 * size, 4)
    dispatched = torch.empty_like(tokens)
    dist.all_to_all_single(dispatched, tokens)
    dist.all_to_all_single(tokens, dispatched, async_op=True).wait()


def experts_without_tokens(rank, size):
    """Only rank 0 has tokens: the others send nothing, and get some."""
    given = [2] * size if rank == 0 else [0] * size
    got = [2] + [0] * (size - 1)
    dist.all_to_all_single(torch.empty(2, 4), ones(sum(given), 4), got, given)


def uneven_lists(rank, size):
    """gloo cannot do it, NCCL can."""
    given = [rank + 2 * peer for peer in range(size)]
    got = [peer + 2 * rank for peer in range(size)]
    dist.all_to_all([torch.empty(length) for length in got], [ones(length) for length in given])


def other_backend(rank, size):
    """A group for which the program names a backend."""
    for backend in ("gloo", "nccl"):
        dist.all_reduce(ones(), group=dist.new_group(list(range(size)), backend=backend))


def asks_rank_before(rank, size):
    store = dist.distributed_c10d._get_default_store()
    if rank > 0:
        assert store.get(f"rank {rank - 1}") == b"here"
        store.wait([f"rank {rank - 1}"])
    store.set(f"rank {rank}", "here")
    assert store.add("ranks", 1) > rank


def told_of_checks(kind, tell):
    """A kind of store that tells when somebody has looked for a key."""

    class Store(kind):
        def check(self, keys):
            found = super().check(keys)
            tell()
            return found

    return Store


def asks_rank_beside(rank, size, folder):
    """Rank 2 asks for a key before rank 1 sets it."""
    asked = folder / "asked"
    store = told_of_checks(dist.FileStore, asked.touch)(str(folder / "store"), size)
    if rank == 1:
        while not asked.exists():
            time.sleep(0.01)
        store.set("key", "here")
    elif rank == 2:
        assert store.get("key") == b"here"


def asks_its_thread(rank, size):
    asked = threading.Event()
    store = told_of_checks(dist.HashStore, asked.set)()
    thread = threading.Thread(target=lambda: asked.wait() and store.set("key", "here"))
    thread.start()
    assert store.get("key") == b"here"
    thread.join()


def checked_barrier(rank, size):
    dist.monitored_barrier()


def ring(rank, size):
    work = dist.isend(ones(), (rank + 1) % size)
    dist.recv(ones(), (rank - 1) % size)
    work.wait()


# -- with a fault


def sends_first(rank, size):
    """All depend on buffers."""
    dist.send(ones(), (rank + 1) % size)  # fault
    dist.recv(ones(), (rank - 1) % size)


def stage_in_wrong_order(rank, size):
    """A stage sends a gradient where the next one expects an activation."""
    small, large = ones(2), ones(8)
    if rank == 0:
        dist.send(large, 1)  # fault
        dist.send(small, 1)
    elif rank == 1:
        dist.recv(small, 0)  # fault
        dist.recv(large, 0)


def fewer_microbatches(rank, size):
    for _ in range(3 if rank == 2 else 4):
        if rank > 0:
            dist.recv(ones(), rank - 1)  # fault
        if rank < size - 1:
            dist.send(ones(), rank + 1)


def group_of_some(rank, size):
    if rank != 2:
        group = dist.new_group([0, 1, 2])  # fault
        if rank < 2:
            dist.all_reduce(ones(), group=group)


def swapped_dimensions(rank, size):
    names = ("dp", "tp") if rank < 4 else ("tp", "dp")
    shape = (4, 2) if rank < 4 else (2, 4)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)  # fault
    dist.all_reduce(ones(), group=mesh["dp"].get_group())


def other_order_of_groups(rank, size):
    """Groups are numbered in the order in which a rank makes them."""
    lists = [[0, 1], [2, 3], [0, 2], [1, 3]]
    for ranks in lists if rank != 3 else lists[2:] + lists[:2]:
        dist.new_group(ranks)  # fault


def bucket_order(rank, size):
    buckets = [ones(16), ones(32)]
    for bucket in buckets if rank != 3 else buckets[::-1]:
        dist.all_reduce(bucket)  # fault


def other_root(rank, size):
    dist.broadcast(ones(), src=1 if rank == 2 else 0)  # fault


def other_reduction(rank, size):
    dist.all_reduce(ones(), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)  # fault


def other_type(rank, size):
    dist.all_reduce(ones().to(torch.bfloat16 if rank == 0 else torch.float32))  # fault


def last_batch(rank, size):
    dist.all_gather_into_tensor(ones(4 * size), ones(4))
    part = 3 if rank == 3 else 4
    dist.all_gather_into_tensor(ones(part * size), ones(part))  # fault


def uneven_experts(rank, size):
    out_splits = [1] * size
    if rank == 1:
        out_splits[0] = 2
    dist.all_to_all_single(ones(sum(out_splits)), ones(size), out_splits, [1] * size)  # fault


def no_items(rank, size):
    """underworld3#611: a rank without particles leaves the loop early, and the others reduce without it."""
    items = 0 if rank == 2 else 5
    for _ in range(3):
        if not items:
            break
        dist.all_reduce(ones())  # fault


def opposite_groups(rank, size):
    first, second = dist.new_group(list(range(size))), dist.new_group(list(range(size)))
    if rank == 1:
        first, second = second, first
    dist.all_reduce(ones(), group=first)  # fault
    dist.all_reduce(ones(), group=second)


def opposite_groups_at_once(rank, size):
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    works = []
    for group in groups if rank != 1 else groups[::-1]:
        works.append(dist.all_reduce(ones(), group=group, async_op=True))  # fault
    for work in works:
        work.wait()


def two_groups_and_host(rank, size):
    """torchrec#4149: most ranks wait for one group by a synchronize, two for another one by tolist()."""
    data, sizes = dist.new_group(list(range(size))), dist.new_group(list(range(size)))
    counts = ones()
    if rank < size - 2:
        dist.all_reduce(ones(), group=data, async_op=True)
        torch.cuda.synchronize()  # fault
        dist.all_reduce(counts, group=sizes, async_op=True)
        counts.tolist()
    else:
        dist.all_reduce(counts, group=sizes, async_op=True)
        counts.tolist()  # fault
        dist.all_reduce(ones(), group=data, async_op=True)


def nobody_receives(rank, size):
    if rank == 0:
        dist.isend(ones(), 1)  # fault


def wrong_source(rank, size):
    if rank == 0:
        dist.send(ones(), 2)
    elif rank == 2:
        dist.recv(ones(), 1)  # fault


def barrier_on_one_rank(rank, size):
    if rank == 0:
        dist.barrier()  # fault


def other_layers(rank, size):
    model = mlp() if rank != 1 else nn.Sequential(*mlp(), nn.Linear(8, 8))
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)  # fault


def missing_pass(rank, size):
    mesh = mesh_of(size)
    for step in range(3):
        if not (rank == 5 and step == 2):
            dist.all_reduce(ones(), group=mesh["tp"].get_group())  # fault
        dist.all_reduce(ones(), group=mesh["dp"].get_group())


def typed(rank, size, reduces):
    """A product of two partial sums is not the product of the sums."""
    import spmd_types as spmd
    import spmd_types.checker

    mesh = mesh_of(size)
    data, tensor = mesh.get_group("dp"), mesh.get_group("tp")
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck():
        part = torch.randn(4)
        spmd.assert_type(part, {data: spmd.R, tensor: spmd.P})
        whole = spmd.all_reduce(part, tensor, src=spmd.P, dst=spmd.R) if reduces else part
        torch.mul(whole, whole)  # fault
    tensor_and_sequence(rank, size)


# -- what a world refuses


def wrong_size(rank, size):
    if size % 3:
        raise ValueError(f"{size} ranks cannot be split into thirds")  # fault


def own_world(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size + 1)  # fault


def starts_process(rank, size):
    subprocess.run(["true"], check=True)  # fault


def opens_socket(rank, size):
    socket.create_server(("127.0.0.1", 0))  # fault


def opens_store(rank, size):
    dist.TCPStore("127.0.0.1", 0, size, rank == 0)  # fault


def calls_nccl(rank, size):
    torch.cuda.nccl.all_reduce([ones()])  # fault


def asks_for_object(rank, size):
    dist.broadcast_object_list([rank], src=0)  # fault


def asks_for_scattered_object(rank, size):
    dist.scatter_object_list([None], [1] * size if rank == 0 else None, src=0)  # fault


def asks_nobody(rank, size, file):
    if rank == 1:
        dist.PrefixStore("mine", dist.FileStore(str(file), size)).wait(["set", "unset"])  # fault


def asks_default_store(rank, size):
    dist.distributed_c10d._get_default_store().get("unset")  # fault


def sends_datagram(rank, size):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9))  # fault


def says(rank, size):
    print(f"rank {rank} says")


def never_ends(rank, size):
    while rank == 1:
        time.sleep(0.1)  # fault


def fills_disk(rank, size):
    """No file that this rank writes from now on has room."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def leaves_process(rank, size):
    """Python does not see this fork."""
    if ctypes.CDLL(None).fork() == 0:
        signal.pause()


def tells_and_waits(rank, size, told):
    if rank > 0:
        os.write(told, b"!")
        signal.pause()


def is_killed(rank, size):
    if rank == 1:
        faulthandler.disable()  # its stacks would stand in the output of the tests
        os.kill(os.getpid(), signal.SIGSEGV)


def reads_values(rank, size):
    total = ones()
    dist.all_reduce(total)
    mean = total / size
    if mean.sum().item() > 100:  # fault
        dist.barrier()


def waits_for_votes(rank, size):
    """It goes on when all ranks have voted: alike ones do."""
    votes = ones(1)
    dist.all_reduce(votes)
    while votes.item() < size:  # fault
        votes = ones(1)
        dist.all_reduce(votes)


def sums_ranks(rank, size):
    """The values are not alike, whatever a rank computes with its own."""
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if total.item() < 0:  # fault
        dist.barrier()
