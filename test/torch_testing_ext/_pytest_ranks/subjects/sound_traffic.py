"""Sound steps of many kinds, whose traffic is the same in each run, and the same as torch's profiler counts."""

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

STEPS = {}


def of_step(make):
    """A function that makes a step: of the mesh of all ranks, and the number of this one."""
    STEPS[make.__name__] = make
    return make


def mlp(size=8):
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))


def trained(model, rows=4, size=8):
    return lambda: model(torch.ones(rows, size)).sum().backward()


@of_step
def asynchronous(mesh, rank):
    def step():
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()

    return step


@of_step
def of_a_root(mesh, rank):
    def step():
        parts = [torch.ones(4), torch.ones(4)]
        dist.broadcast(parts[0], 0)
        dist.reduce(parts[1], 1)
        dist.scatter(torch.empty(4), parts if rank == 0 else None, 0)
        dist.gather(torch.ones(4), parts if rank == 1 else None, 1)

    return step


@of_step
def ring(mesh, rank):
    def step():
        sent = dist.P2POp(dist.isend, torch.ones(4), 1 - rank)
        received = dist.P2POp(dist.irecv, torch.empty(4), 1 - rank)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    return step


@of_step
def tensors(mesh, rank):
    def step():
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
        dist.all_to_all_single(torch.empty(8), torch.ones(8))
        dist.barrier()

    return step


@of_step
def lists(mesh, rank):
    def step():
        parts = [torch.ones(4), torch.ones(4)]
        dist.all_gather(parts, torch.ones(4))
        dist.reduce_scatter(torch.empty(4), parts)

    return step


@of_step
def of_many_types(mesh, rank):
    def step():
        for dtype in (torch.bool, torch.int8, torch.int32, torch.float64, torch.bfloat16):
            dist.broadcast(torch.ones(3, dtype=dtype), 0)
        dist.all_reduce(torch.ones(()))
        dist.all_reduce(torch.ones(0, 4))

    return step


@of_step
def mixture_of_experts(mesh, rank):
    tokens, expert = torch.ones(6, 4), nn.Linear(4, 4)

    def step():
        # The first rank's expert is the popular one.
        sent = torch.tensor([4, 2])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there = torch.empty(int(received.sum()), 4)
        dist.all_to_all_single(there, tokens, received.tolist(), sent.tolist())
        dist.all_to_all_single(torch.empty(6, 4), expert(there).detach(), sent.tolist(), received.tolist())

    return step


@of_step
def objects(mesh, rank):
    return lambda: dist.broadcast_object_list([{"step": 1}], 0)


@of_step
def functional_calls(mesh, rank):
    def step():
        x = functional.all_reduce(torch.ones(4), "sum", mesh)
        x = functional.all_gather_tensor(x, 0, mesh)
        x = functional.reduce_scatter_tensor(x, "sum", 0, mesh)
        functional.all_to_all_single(x, None, None, mesh).sum()

    return step


@of_step
def functional_calls_of_lists(mesh, rank):
    def step():
        parts = [torch.ones(4), torch.ones(2, 2)]
        functional.all_reduce_coalesced(parts, "sum", mesh)[0].sum()
        functional.all_gather_into_tensor_coalesced(parts, mesh)[0].sum()
        functional.reduce_scatter_tensor_coalesced(parts, "sum", [0, 0], mesh)[0].sum()
        functional.broadcast(torch.ones(4), 0, mesh).sum()
        functional.permute_tensor(torch.ones(4), [1, 0], mesh).sum()

    return step


@of_step
def compiled_functional_calls(mesh, rank):
    @torch.compile(backend="aot_eager")
    def gathered(x):
        return functional.all_gather_tensor(functional.all_reduce(x * 2, "sum", mesh) + 1, 0, mesh) * 2

    return lambda: gathered(torch.ones(4)).sum()


@of_step
def ddp_of_a_static_graph(mesh, rank):
    return trained(DistributedDataParallel(mlp(), static_graph=True))


@of_step
def ddp_with_unused_parameters(mesh, rank):
    model = mlp()
    model.unused = nn.Linear(4, 4)
    forward = nn.Sequential.forward
    model.forward = lambda x: forward(model[:3], x)
    return trained(DistributedDataParallel(model, find_unused_parameters=True))


@of_step
def ddp_with_buffers(mesh, rank):
    return trained(DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))))


@of_step
def ddp_in_float16(mesh, rank):
    model = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    model.register_comm_hook(None, fp16_compress_hook)
    return trained(model)


@of_step
def sharded_optimizer(mesh, rank):
    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def step():
        trained(model)()
        optimizer.step()
        optimizer.zero_grad()

    return step


@of_step
def fsdp2_in_bfloat16(mesh, rank):
    model, policy = mlp(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return trained(model)


@of_step
def fsdp2_of_checkpoints(mesh, rank):
    model = mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return lambda: checkpoint(model, torch.ones(4, 8, requires_grad=True), use_reentrant=False).sum().backward()


@of_step
def fsdp2_with_clipping(mesh, rank):
    model = mlp()
    fully_shard(model, mesh=mesh)

    def step():
        trained(model)()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return step


@of_step
def tensor_parallel(mesh, rank):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return trained(parallelize_module(mlp(), mesh, plan))


@of_step
def sequence_parallel(mesh, rank):
    model = nn.Sequential(nn.LayerNorm(8), *mlp())
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    model = parallelize_module(model, mesh, plan)
    return lambda: model(torch.ones(2, 4, 8)).sum().backward()


@of_step
def redistributed(mesh, rank):
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])

    def step():
        partial = tensor.sum(0)
        assert partial.placements == (Partial(),)
        partial.redistribute(mesh, [Replicate()])
        tensor.redistribute(mesh, [Shard(1)])

    return step


@of_step
def compiled_tensor_parallel(mesh, rank):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return trained(torch.compile(parallelize_module(mlp(), mesh, plan), backend="aot_eager"))


@of_step
def compiled_ddp(mesh, rank):
    return trained(torch.compile(DistributedDataParallel(mlp()), backend="aot_eager"))


@of_step
def one_forward_one_backward(mesh, rank):
    stage = PipelineStage(nn.Linear(8, 8), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    batch = torch.ones(4, 8)
    return lambda: schedule.step(*[batch][: rank == 0], target=batch if rank == 1 else None)


@of_step
def interleaved(mesh, rank):
    stages = [PipelineStage(nn.Linear(8, 8), rank + 2 * part, 4, torch.device("cpu")) for part in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    batch = torch.ones(4, 8)
    return lambda: schedule.step(*[batch][: rank == 0], target=batch if rank == 1 else None)


# The other steps wait for each call before they compute.
OVERLAPPING = {"fsdp2_in_bfloat16", "fsdp2_of_checkpoints", "one_forward_one_backward", "interleaved"}
# By the beginnings of torch's own names: the longer ones first.
KINDS = {
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    **dict.fromkeys(("broadcast", "reduce", "gather", "send", "recv", "barrier")),
    "scatter": "scatter",
}
BYTES = {"bool": 1, "signed char": 1, "unsigned char": 1, "c10::Half": 2, "c10::BFloat16": 2, "int": 4, "float": 4}
BYTES |= {"long": 8, "long int": 8, "double": 8}


def profiled(step, path):
    """Calls by their kinds, and bytes, by torch's profiler: it hears the dispatcher, and gloo of its inputs."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(path))
    calls, size = Counter(), 0
    for event in json.loads(path.read_text())["traceEvents"]:
        place, _, name = event.get("name", "").partition(":")
        name = name.strip(":_")
        if place == "c10d":
            start = next(start for start in KINDS if name.startswith(start))
            calls[KINDS[start] or start] += 1
        elif place == "gloo" and name != "recv":
            given = event["args"]
            for shape, dtype in zip(given.get("Input Dims", ()), given.get("Input type", ()), strict=True):
                size += torch.Size(shape).numel() * BYTES[dtype]
    return calls, size


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", STEPS)
def test_sound(dist_env, traffic, name, tmp_path):
    step = STEPS[name](init_device_mesh("cpu", (2,)), dist_env.rank)
    for _ in range(3):
        step()
    calls, size = profiled(step, tmp_path / f"{dist_env.rank}.json")
    with traffic() as seen:
        step()
    assert calls and seen.calls() == calls.total()
    assert {kind: seen.calls(op=kind) for kind in calls} == calls
    assert seen.bytes() == size > 0
    assert name in OVERLAPPING or seen.overlapped() == 0
    seen.within(f"budgets/{name}.toml")


@pytest.mark.world_size(4)
def test_hybrid(dist_env, traffic):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = mlp()
    fully_shard(model, mesh=mesh)
    step = trained(model)
    step()
    with traffic(model) as seen:
        step()
    assert seen.calls("replicate", "all_reduce") == 1 and seen.calls("shard", "reduce_scatter") == 1
    seen.within("budgets/hybrid.toml")


@pytest.mark.world_size(2, devices=2)
def test_devices(dist_env, traffic):
    """On fake accelerators: reading a value waits for the device."""
    model = DistributedDataParallel(mlp().to(dist_env.device))

    def step():
        loss = model(torch.ones(4, 8, device=dist_env.device)).sum()
        loss.backward()
        return loss

    step()
    with traffic(model) as seen:
        step()
    assert seen.host_waits == 0
    seen.within("budgets/devices.toml")
    with traffic(model) as seen:
        step().item()
    assert seen.host_waits == 1
