"""Training on fake accelerators, with the numbers of one process on the CPU: run with --fake-accelerators 4."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

KIND = "fakeacc"
in_ranks = pytest.mark.world_size([2, 4])


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))


def data_of(rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def train(module, losses, steps=3):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        losses(module).backward()
        optimizer.step()


def trained_on_cpu(world_size):
    """The parameters that one process gets from the data of all ranks."""
    net = make_net()
    train(net, lambda net: sum(net(data_of(rank)).pow(2).mean() for rank in range(world_size)) / world_size)
    return [parameter.detach() for parameter in net.parameters()]


def check_trained(module, env, full=lambda parameter: parameter):
    train(module, lambda module: module(data_of(env.rank).to(env.device)).pow(2).mean())
    for parameter, expected in zip(module.parameters(), trained_on_cpu(env.world_size), strict=True):
        assert parameter.device.type == KIND
        assert_close(full(parameter).detach().cpu(), expected, rtol=1e-4, atol=1e-5)


@in_ranks
def test_ddp(dist_env):
    check_trained(DistributedDataParallel(make_net().to(dist_env.device), device_ids=[dist_env.device.index]), dist_env)


@in_ranks
def test_synchronized_batch_norm(dist_env):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3))
    whole = torch.randn(8, 2, 5)
    part = whole.chunk(dist_env.world_size)[dist_env.rank].to(dist_env.device)
    on_device = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net)).to(dist_env.device)
    model = DistributedDataParallel(on_device, device_ids=[dist_env.device.index])
    outputs = []
    for module, batch in ((net, whole), (model, part)):
        outputs.append(module(batch))
        outputs[-1].pow(3).sum().backward()
    assert_close(outputs[1].cpu(), outputs[0].chunk(dist_env.world_size)[dist_env.rank])
    for parameter, expected in zip(on_device.parameters(), net.parameters(), strict=True):
        assert_close(parameter.grad.cpu() * dist_env.world_size, expected.grad, rtol=1e-4, atol=1e-4)
    for buffer, expected in zip(on_device.buffers(), net.buffers(), strict=True):
        assert_close(buffer.cpu(), expected)


@in_ranks
def test_objects(dist_env):
    objects = [torch.ones(1, device=dist_env.device) if dist_env.rank == 0 else None]
    dist.broadcast_object_list(objects, 0, device=dist_env.device)
    assert objects[0].item() == 1
    gathered = [None] * dist_env.world_size
    dist.all_gather_object(gathered, torch.full((1,), dist_env.rank, device=dist_env.device))
    assert [int(each) for each in gathered] == list(range(dist_env.world_size))


@in_ranks
def test_a_tensor_whose_first_dimension_is_not_the_number_of_ranks(dist_env):
    size = dist_env.world_size
    gathered = torch.empty(1, size, device=dist_env.device)
    dist.all_gather_into_tensor(gathered, torch.full((1, 1), dist_env.rank, device=dist_env.device).float())
    assert gathered.tolist() == [list(range(size))]
    mine = torch.empty(1, 1, device=dist_env.device)
    dist.reduce_scatter_tensor(mine, gathered)
    assert mine.item() == size * dist_env.rank


@in_ranks
def test_offloaded_parameters(dist_env):
    net = fully_shard(make_net(), offload_policy=CPUOffloadPolicy())
    train(net, lambda net: net(data_of(dist_env.rank).to(dist_env.device)).pow(2).mean(), steps=1)
    assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}


@in_ranks
def test_fsdp2(dist_env):
    net = make_net().to(dist_env.device)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    check_trained(fully_shard(net), dist_env, lambda parameter: parameter.full_tensor())


@pytest.mark.world_size(4)
def test_hsdp(dist_env):
    mesh = init_device_mesh(KIND, (2, 2), mesh_dim_names=("replicate", "shard"))
    net = fully_shard(make_net().to(dist_env.device), mesh=mesh)
    check_trained(net, dist_env, lambda parameter: parameter.full_tensor())


@in_ranks
def test_fsdp1(dist_env):
    net = FullyShardedDataParallel(make_net().to(dist_env.device), device_id=dist_env.device, use_orig_params=True)
    train(net, lambda net: net(data_of(dist_env.rank).to(dist_env.device)).pow(2).mean())
    with FullyShardedDataParallel.summon_full_params(net):
        for parameter, expected in zip(net.parameters(), trained_on_cpu(dist_env.world_size), strict=True):
            assert_close(parameter.cpu(), expected, rtol=1e-4, atol=1e-5)


@in_ranks
def test_dtensor(dist_env):
    mesh = init_device_mesh(KIND, (dist_env.world_size,))
    x = torch.arange(4.0 * dist_env.world_size).view(dist_env.world_size * 2, 2)
    sharded = distribute_tensor(x.to(dist_env.device), mesh, [Shard(0)])
    assert sharded.to_local().shape == (2, 2)
    assert sharded.redistribute(mesh, [Replicate()]).to_local().cpu().equal(x)
    assert sharded.sum(0).full_tensor().cpu().equal(x.sum(0))
    other_way = sharded.redistribute(mesh, [Shard(1)])
    assert other_way.full_tensor().cpu().equal(x)


@in_ranks
def test_tensor_parallel(dist_env):
    mesh = init_device_mesh(KIND, (dist_env.world_size,))
    net = make_net().to(dist_env.device)
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    expected = make_net()
    for module, device in ((net, dist_env.device), (expected, "cpu")):
        module(data_of(0).to(device)).pow(2).mean().backward()
    for parameter, other in zip(net.parameters(), expected.parameters(), strict=True):
        grad = parameter.grad
        assert_close((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).cpu(), other.grad)


@in_ranks
def test_checkpoint(dist_env, tmp_path_factory):
    folder = [str(tmp_path_factory.mktemp("checkpoint"))]
    dist.broadcast_object_list(folder)
    net = fully_shard(make_net().to(dist_env.device))
    expected = [parameter.full_tensor().clone() for parameter in net.parameters()]
    dcp.save(net.state_dict(), checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    state = net.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    net.load_state_dict(state)
    for parameter, value in zip(net.parameters(), expected, strict=True):
        assert parameter.device.type == KIND and parameter.full_tensor().equal(value)


@in_ranks
def test_pipeline(dist_env):
    rank, size = dist_env.rank, dist_env.world_size
    layers = [nn.Linear(8, 8) for _ in range(size)]
    for number, layer in enumerate(layers):
        torch.manual_seed(number)
        layer.reset_parameters()
    stage = PipelineStage(layers[rank].to(dist_env.device), rank, size, dist_env.device)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    target = data_of(1)
    words = [data_of(0).to(dist_env.device)] if rank == 0 else []
    if rank == size - 1:
        output = schedule.step(*words, target=target.to(dist_env.device))
        for number in range(size - 1):
            torch.manual_seed(number)
            layers[number].reset_parameters()
        assert_close(output.cpu(), nn.Sequential(*layers).cpu()(data_of(0)), rtol=1e-4, atol=1e-5)
    else:
        schedule.step(*words)
