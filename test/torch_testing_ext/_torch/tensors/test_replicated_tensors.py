"""The tensors that ranks of a group hold alike are found, with their names."""

import torch
from kit.own_process import in_own_process
from kit.plain_groups import fake_world, world_of_one
from torch import nn

from torch_testing_ext._torch.tensors import replicated_tensors


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tensor):
        return self.norm(self.linear(tensor))


@in_own_process
def test_ddp():
    world_of_one()
    model = Model()
    model._ddp_params_and_buffers_to_ignore = ["linear.bias"]
    ddp = nn.parallel.DistributedDataParallel(model)
    found = {one.name: one for one in replicated_tensors.tensors_of_ddp(ddp)}
    # Not the statistics of a norm, which ranks have for themselves, nor what DDP ignores.
    assert {*found} == {"linear.weight", "norm.weight", "norm.bias", "scale"}
    assert [name for name, one in found.items() if one.is_buffer] == ["scale"]
    assert found["linear.weight"].tensor.data_ptr() == model.linear.weight.data_ptr()
    assert not found["linear.weight"].tensor.requires_grad
    others = nn.parallel.DistributedDataParallel(Model(), broadcast_buffers=False)
    assert not any(one.is_buffer for one in replicated_tensors.tensors_of_ddp(others))
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd

    state = local_sgd.PostLocalSGDState(None, None, start_localSGD_iter=5)
    others.register_comm_hook(state, local_sgd.post_localSGD_hook)
    assert replicated_tensors.tensors_of_ddp(others) == []


@in_own_process
def test_dtensors():
    assert [*replicated_tensors.dtensors_of(torch.optim.SGD(Model().parameters()), dict)] == []
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    fake_world(4)
    mesh = init_device_mesh("cpu", (2, 2))
    alike = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()]))
    apart = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)]))
    optimizer = torch.optim.SGD([apart, alike, nn.Parameter(torch.ones(1))])
    ((group, one),) = replicated_tensors.dtensors_of(optimizer, lambda: {id(alike): "model.weight"})
    assert group is mesh.get_group(1) and one.name == "model.weight" and one.tensor.shape == (2,)
    ((_, one),) = replicated_tensors.dtensors_of(optimizer, dict)
    assert one.name == "parameter 1"
    named = torch.optim.SGD([("a", apart), ("b", alike)])
    ((_, one),) = replicated_tensors.dtensors_of(named, lambda: {id(alike): "other"})
    assert one.name == "b"


def test_names_around():
    class Trainer:
        def __init__(self, model):
            self.model = model

        def names(self):
            return replicated_tensors.names_around()

    model, local = nn.Linear(1, 1), nn.Linear(2, 1)
    names = Trainer(model).names()
    assert names[id(model.weight)] == "weight" and names[id(local.bias)] == "bias"


def test_steps():
    said, parameter = [], nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.ones(1)
    handles = replicated_tensors.watch_steps(
        lambda *_: said.append(parameter.item()), lambda *_: said.append(parameter.item())
    )
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert said == [1.0, 0.5]
