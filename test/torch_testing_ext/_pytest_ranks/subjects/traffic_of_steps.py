"""Steps of training, sound or with planted faults, whose traffic is compared with budgets."""

import os
from contextlib import nullcontext, suppress
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

IS_FAULTY = os.environ.get("PLANTED") == "1"


class Layers(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.recomputes = recomputes

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=False) if self.recomputes else self.first(x)
        return self.second(self.norm(hidden).relu())


def compare(step, traffic, model, name):
    step()
    step()
    with traffic(model) as seen:
        step()
    seen.within(f"{name}.toml")
    return seen


@pytest.mark.world_size(2)
def test_no_sync_forgotten(dist_env, traffic):
    model = DistributedDataParallel(Layers(), broadcast_buffers=False)

    def step():
        for number in range(2):
            with model.no_sync() if number == 0 and not IS_FAULTY else nullcontext():
                model(torch.ones(4, 8)).sum().backward()

    seen = compare(step, traffic, model, "no_sync")
    assert seen.bytes("world", "all_reduce") > 0


@pytest.mark.world_size(2)
def test_buffers_broadcast(dist_env, traffic):
    model = DistributedDataParallel(Layers(), broadcast_buffers=IS_FAULTY)
    compare(lambda: model(torch.ones(4, 8)).sum().backward(), traffic, model, "buffers")


@pytest.mark.world_size(4)
def test_world_in_place_of_dp(dist_env, traffic):
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).get_group("dp")
    gradient = torch.ones(16)
    compare(lambda: dist.all_reduce(gradient, group=None if IS_FAULTY else group), traffic, None, "dp")


@pytest.mark.world_size(2)
def test_gather_per_chunk(dist_env, traffic):
    chunks = torch.ones(4, 8)

    def step():
        for part in chunks if IS_FAULTY else [chunks]:
            dist.all_gather([torch.empty_like(part) for _ in range(2)], part)

    compare(step, traffic, None, "chunks")


@pytest.mark.world_size(2)
def test_objects_in_the_loop(dist_env, traffic):
    def step():
        dist.all_reduce(torch.ones(2))
        if IS_FAULTY:
            dist.all_gather_object([None, None], "loss")

    compare(step, traffic, None, "objects")


@pytest.mark.world_size(2)
def test_barrier_in_the_loop(dist_env, traffic):
    def step():
        dist.all_reduce(torch.ones(2))
        if IS_FAULTY:
            dist.barrier()

    compare(step, traffic, None, "barrier")


@pytest.mark.world_size(2)
def test_gradients_in_float32(dist_env, traffic):
    dtype = torch.float32 if IS_FAULTY else torch.bfloat16
    compare(lambda: dist.all_reduce(torch.ones(32, dtype=dtype)), traffic, None, "types")


@pytest.mark.world_size(2)
def test_norm_per_parameter(dist_env, traffic):
    norms = torch.ones(5)

    def step():
        for norm in norms if IS_FAULTY else [norms]:
            dist.all_reduce(norm)

    compare(step, traffic, None, "norms")


@pytest.mark.world_size(2)
def test_replicated_and_back(dist_env, traffic):
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])

    def step():
        dist.all_reduce(torch.ones(2))
        if IS_FAULTY:
            tensor.redistribute(mesh, [Replicate()]).to_local().sum()

    compare(step, traffic, None, "dtensor")


@pytest.mark.world_size(2)
def test_gathered_again_at_recomputation(dist_env, traffic):
    model = Layers(recomputes=True)
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh, reshard_after_forward=IS_FAULTY)
    fully_shard(model, mesh=mesh)
    compare(lambda: model(torch.ones(4, 8)).sum().backward(), traffic, model, "recomputed")


@pytest.mark.world_size(2)
def test_padded_all_to_all(dist_env, traffic):
    def step():
        rows = 8 if IS_FAULTY else 1 + dist_env.rank
        sizes = [rows, rows] if IS_FAULTY else [1 + dist_env.rank] * 2
        wanted = [8, 8] if IS_FAULTY else [1, 2]
        dist.all_to_all_single(torch.empty(sum(wanted), 4), torch.ones(sum(sizes), 4), wanted, sizes)

    compare(step, traffic, None, "padded")


@pytest.mark.world_size(2)
def test_break_of_the_graph(dist_env, traffic):
    def body(x):
        x = functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
        if IS_FAULTY:
            torch._dynamo.graph_break()
            x = functional.wait_tensor(functional.all_reduce(x, "max", dist.group.WORLD))
        return x

    compiled = torch.compile(body, backend="aot_eager")
    compare(lambda: compiled(torch.ones(4)), traffic, None, "compiled")


@pytest.mark.world_size(2)
def test_item_each_step(dist_env, traffic):
    loss = torch.ones(())

    def step():
        dist.all_reduce(loss)
        if IS_FAULTY:
            loss.item()

    seen = compare(step, traffic, None, "item")
    assert seen.host_waits == 0


@pytest.mark.world_size(4, nodes=2)
def test_gathered_between_nodes(dist_env, traffic):
    within = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist_env.node]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist_env.local_rank]
    with traffic() as seen:
        dist.all_gather([torch.empty(4)] * 2, torch.ones(4), group=across if IS_FAULTY else within)
    assert seen.between_nodes() == 0


@pytest.mark.world_size(2)
def test_waited_at_once(dist_env, traffic):
    weight, gradient = torch.ones(4, 4), torch.ones(8)

    def step():
        work = dist.all_reduce(gradient, async_op=True)
        if IS_FAULTY:
            work.wait()
        weight @ weight
        if not IS_FAULTY:
            work.wait()

    assert compare(step, traffic, None, "at_once").overlapped("world", "all_reduce") == 1


@pytest.mark.world_size(2)
def test_functional_waited_at_once(dist_env, traffic):
    weight, gradient = torch.ones(4, 4), torch.ones(8)

    def step():
        reduced = functional.all_reduce(gradient, "sum", dist.group.WORLD)
        if IS_FAULTY:
            reduced = reduced + 1
        weight @ weight
        return reduced + 1

    assert compare(step, traffic, None, "functional").overlapped() == 1


@pytest.mark.world_size(2)
def test_buckets_in_one(dist_env, traffic):
    """The last bucket has no backward pass beside it."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    model = DistributedDataParallel(model, bucket_cap_mb=25 if IS_FAULTY else 0.005)

    def step():
        model(torch.ones(4, 32)).sum().backward()

    step()
    step()
    with traffic(model) as seen:
        step()
    assert seen.overlapped("world", "all_reduce") >= 0.7


def sharded(prefetches=True, reshards=True):
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshards)
    fully_shard(layers, reshard_after_forward=reshards)
    if prefetches:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    return layers


@pytest.mark.world_size(2)
def test_prefetch_lost(dist_env, traffic):
    model = sharded(prefetches=not IS_FAULTY)
    seen = compare(lambda: model(torch.ones(4, 64)).sum().backward(), traffic, model, "prefetch")
    assert seen.overlapped(op="reduce_scatter_tensor") > 0.8
    assert seen.overlapped(op="all_gather_into_tensor") > 0.8


@pytest.mark.world_size(2)
def test_not_resharded(dist_env, traffic):
    model = sharded(reshards=not IS_FAULTY)

    def step():
        model(torch.ones(4, 64)).sum().backward()

    step()
    step()
    with traffic(model) as seen:
        step()
    # Of all layers without a shard: 133,120 bytes.
    assert seen.memory() < 133_120


@pytest.mark.world_size(2)
def test_activations_kept(dist_env, traffic):
    def block():
        return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(16, 16), nn.ReLU())])

    blocks = [block() for _ in range(4)]

    def step():
        x = torch.ones(512, 16)
        for each in blocks:
            x = each(x) if IS_FAULTY else checkpoint(each, x, use_reentrant=False)
        x.sum().backward()
        dist.all_reduce(x.detach().sum())

    step()
    with traffic() as seen:
        step()
    assert seen.memory() < 500_000


@pytest.mark.world_size(2)
def test_synchronized_each_step(dist_env, traffic):
    def step():
        dist.all_reduce(torch.ones(2))
        if IS_FAULTY:
            # It counts without a device, too.
            with suppress(AssertionError, RuntimeError):
                torch.cuda.synchronize()

    assert compare(step, traffic, None, "synchronize").host_waits == 0


@pytest.mark.world_size(2)
def test_microbatch_sent_twice(dist_env, traffic):
    stage = PipelineStage(nn.Linear(8, 8), dist_env.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4 if IS_FAULTY else 2, loss_fn=lambda out, target: (out - target).square().sum())

    def step():
        if dist_env.rank == 0:
            schedule.step(torch.ones(4, 8))
        else:
            schedule.step(target=torch.zeros(4, 8))

    seen = compare(step, traffic, None, "pipeline")
    assert seen.bytes(op="send") == 128


@pytest.mark.world_size(2)
def test_tied_weight_twice(dist_env, traffic):
    model = nn.ModuleDict({"embed": nn.Embedding(8, 8), "head": nn.Linear(8, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    # The parameters of a model have it once.
    tied = [module.weight for module in model.values()] if IS_FAULTY else [*model.parameters()]

    def step():
        model["head"](model["embed"](torch.arange(4))).sum().backward()
        for weight in tied:
            dist.all_reduce(weight.grad)

    compare(step, traffic, model, "tied")


@pytest.mark.world_size(2)
def test_small_buckets(dist_env, traffic):
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    model = DistributedDataParallel(model, bucket_cap_mb=0.0005 if IS_FAULTY else 25)
    compare(lambda: model(torch.ones(4, 16)).sum().backward(), traffic, model, "small_buckets")


@pytest.mark.world_size(2)
def test_bytes_grow_over_steps(dist_env, traffic):
    seen = []

    def step():
        seen.append(torch.ones(4))
        if not IS_FAULTY:
            del seen[:-1]
        dist.all_reduce(torch.cat(seen))

    compare(step, traffic, None, "over_steps")


@pytest.mark.world_size(2)
def test_memory_kept_over_steps(dist_env, traffic):
    model, losses = nn.Linear(64, 64), []

    def step():
        loss = model(torch.ones(256, 64)).square()
        # With its graph.
        losses.append(loss if IS_FAULTY else loss.detach().sum())
        dist.all_reduce(losses[-1].detach().clone())

    with traffic(model) as seen:
        for _ in range(4):
            step()
    # Three tensors for each of two steps: 393,216 bytes.
    assert seen.memory() < 393_216


@pytest.mark.world_size(2)
def test_host_waits_in_a_loop(dist_env, traffic):
    def step():
        losses = torch.ones(4)
        dist.all_reduce(losses)
        if IS_FAULTY:
            for loss in losses:
                float(loss)

    assert compare(step, traffic, None, "waits").host_waits == 0


@pytest.mark.world_size(2)
def test_whole_tensor_in_the_loss(dist_env, traffic):
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])

    def step():
        loss = weight.full_tensor().sum() if IS_FAULTY else weight.sum().full_tensor()
        return loss + 1

    compare(step, traffic, None, "whole_tensor")


class Gathers(nn.Module):
    def forward(self, x):
        for part in x if IS_FAULTY else [x]:
            dist.all_gather([torch.empty_like(part) for _ in range(2)], part)
        return x


@pytest.mark.world_size(2)
def test_gathers_in_a_layer(dist_env, traffic):
    model = nn.Sequential()
    model.mlp = nn.Sequential()
    model.mlp.up = Gathers()
    compare(lambda: model(torch.ones(4, 8)), traffic, model, "layer")
