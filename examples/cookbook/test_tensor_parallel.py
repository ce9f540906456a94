"""A tensor-parallel MLP has the output and the gradients of the unsharded one.

Run it: pytest examples/cookbook/test_tensor_parallel.py
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def make_mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


@pytest.mark.world_size([2, 4])
def test_mlp(dist_env):
    mesh = init_device_mesh(dist_env.device.type, (dist_env.world_size,))
    batch = torch.linspace(-1, 1, 3 * 8).reshape(3, 8).to(dist_env.device)
    alone = make_mlp().to(dist_env.device)
    parallel = parallelize_module(
        make_mlp().to(dist_env.device), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )

    torch.testing.assert_close(parallel(batch), alone(batch))
    parallel(batch).sum().backward()
    alone(batch).sum().backward()
    torch.testing.assert_close(parallel[0].weight.grad.full_tensor(), alone[0].weight.grad)
