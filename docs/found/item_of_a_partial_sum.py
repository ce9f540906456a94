"""DTensor: item() of a partial sum returns the part of each rank, not the sum.

A loss that was computed on shards is often a partial sum, and `loss.item()` is what training loops log: every rank logs
another number, and none is the loss. `float(loss)` does the same. The operator behind it, `_local_scalar_dense`, reads
the local part, whatever the placement is.

Seen on torch 2.11 to 2.15. Found by test/distributed/properties/test_dtensor_opinfo_properties.py. Known
as pytorch/pytorch#166638, which is open.

Run this file: it prints what torch returns and what is right, and exits with 1 if they differ.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def item(rank: int, file: str) -> tuple[float, float]:
    """Return the result for a DTensor and for a plain tensor."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    full = torch.tensor([1.0, 2.0])
    sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    return sharded.sum().item(), full.sum().item()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=item, args=(1, f"{directory}/store"), daemon=True)
        other.start()
        got, right = item(0, f"{directory}/store")
        other.join()
    print(f"torch returns {got}, and {right} is right", flush=True)
    sys.exit(got != right)
