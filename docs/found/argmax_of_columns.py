"""DTensor: if columns are sharded, argmax over all elements does not return the first of several maxima.

Seen on torch 2.12 to 2.15. It returns the maximum of the lowest rank, while torch.argmax promises the
first one. Torch 2.11.0 raises an error in gloo instead. Found by
test/distributed/properties/test_dtensor_ops_properties.py. Near: pytorch/pytorch#173936, which was closed.

Run this file: it prints what torch returns and what is right, and exits with 1 if they differ.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def argmax(rank: int, file: str) -> tuple[int, int]:
    """Return the result for a DTensor and for a plain tensor."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    full = torch.tensor([[0.0, 5.0], [5.0, 0.0]])
    sharded = distribute_tensor(full, mesh, [Shard(1)], src_data_rank=None)
    return sharded.argmax().full_tensor().item(), full.argmax().item()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=argmax, args=(1, f"{directory}/store"), daemon=True)
        other.start()
        got, right = argmax(0, f"{directory}/store")
        other.join()
    print(f"torch returns {got}, and {right} is right", flush=True)
    sys.exit(got != right)
