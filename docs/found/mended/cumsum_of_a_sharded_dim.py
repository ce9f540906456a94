"""DTensor: cumsum and cumprod along a sharded dim are wrong if the dim is counted from the end.

Seen on torch 2.11 to 2.13; 2.14 and 2.15 are right. Each rank sums its own part, and no rank adds the preceding parts,
because torch does not recognise -1 as the sharded dim. It does recognise the dim as a positive number. Found by
test/distributed/properties/test_dtensor_ops_properties.py.

Run this file: it prints what torch returns and what is right, and exits with 1 if they differ.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def cumsum(rank: int, file: str) -> tuple[list[float], list[float]]:
    """Return the result for a DTensor and for a plain tensor."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    full = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    return sharded.cumsum(-1).full_tensor().tolist(), full.cumsum(-1).tolist()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=cumsum, args=(1, f"{directory}/store"), daemon=True)
        other.start()
        got, right = cumsum(0, f"{directory}/store")
        other.join()
    print(f"torch returns {got}, and {right} is right", flush=True)
    sys.exit(got != right)
