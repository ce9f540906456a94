"""A checkpoint that four ranks have written is read by two: a restart with another world size.

Run it: pytest examples/cookbook/test_checkpoint.py
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torch_testing_ext.ranks import spawn


def sharded(tensor):
    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def save(rank, folder):
    weight = torch.arange(24.0).reshape(8, 3)
    checkpoint.save({"weight": sharded(weight), "step": 7}, checkpoint_id=folder)


def load(rank, folder):
    state = {"weight": sharded(torch.zeros(8, 3)), "step": 0}
    checkpoint.load(state, checkpoint_id=folder)
    assert state["step"] == 7
    assert state["weight"].to_local().shape == (4, 3)
    torch.testing.assert_close(state["weight"].full_tensor(), torch.arange(24.0).reshape(8, 3))


def test_restart_with_fewer_ranks(tmp_path):
    spawn(save, 4, tmp_path, backend="gloo")
    spawn(load, 2, tmp_path, backend="gloo")
