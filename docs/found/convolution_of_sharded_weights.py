"""DTensor: a convolution with sharded weights, or with an input sharded along its channels, is wrong or fails.

Seen on torch 2.12 to 2.15; 2.11.0 refuses this convolution. Each rank convolves with its own output channels,
but the result claims to be replicated: no rank has all channels, and none says so. The sharding rule asks for
replicated weights; the handler of convolutions does not redistribute them. Found by
test/distributed/properties/test_dtensor_opinfo_properties.py. Known as pytorch/pytorch#186129, which is open;
pytorch/pytorch#191926 and pytorch/pytorch#192147 changed the strategies since.

Run this file: it prints what torch returns and what is right, and exits with 1 if they differ.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def convolve(rank: int, file: str) -> tuple[list[int], list[int]]:
    """Return the shape of the result for DTensors and for plain tensors."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    images, weights = torch.ones(1, 2, 4), torch.ones(6, 2, 3)
    placed = distribute_tensor(images, mesh, [Replicate()], src_data_rank=None)
    sharded = distribute_tensor(weights, mesh, [Shard(0)], src_data_rank=None)
    result = torch.nn.functional.conv1d(placed, sharded).full_tensor()
    return list(result.shape), list(torch.nn.functional.conv1d(images, weights).shape)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=convolve, args=(1, f"{directory}/store"), daemon=True)
        other.start()
        got, right = convolve(0, f"{directory}/store")
        other.join()
    print(f"torch returns a tensor of shape {got}, and {right} is right", flush=True)
    sys.exit(got != right)
